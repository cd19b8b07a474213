"""What the checks that run a step find in its processes, told here without a run."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from nemotron_steps.testing import step_runs, step_subject
from nemotron_steps.testing.watching import Watch


@pytest.mark.parametrize(
    ("value", "choices", "others"),
    [
        ("a", ("a", "b", "c"), ["b", "c"]),
        (None, ("a",), ["a"]),
        (True, (), [False]),
        (False, (), [True]),
        (8, (), [9, 4, 7]),
        (0, (), [1, 1, -1]),
        (0.5, (), [0.25, 1.0]),
        ("x", (), ["x_kit"]),
        (None, (), []),
        ([1], (), []),
    ],
)
def test_other_values_of_a_parameter_are_of_its_kind(value: Any, choices: tuple[Any, ...], others: list[Any]) -> None:
    found = step_runs._other_values(value, choices)
    assert found == others and [type(each) for each in found] == [type(each) for each in others]


def test_a_signal_comes_at_one_file_and_what_the_package_reads_beside_its_code_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.addaudithook", lambda hook: None)
    raised: list[int] = []
    monkeypatch.setattr(signal, "raise_signal", raised.append)
    watch = Watch((str(tmp_path),), str(tmp_path / "work"), "toykit", at_write=2, with_signal=15)
    watch._active = True
    watch._folders = (str(tmp_path / "toykit"),)
    counts = []
    for name in ("a", "b", "c"):
        watch._opened(str(tmp_path / "work" / name), True)
        counts.append(len(raised))
    assert (counts, raised) == ([0, 1, 1], [15])
    for name in ("toykit/a.py", "toykit/a.pyc", "toykit/words.txt", "elsewhere/words.txt"):
        watch._opened(str(tmp_path / name), False)
    assert watch.seen.read == [str(tmp_path / "toykit/words.txt")]
    for _ in range(2):
        watch._changed("/elsewhere/x")
    watch._hook("os.chown", ("/elsewhere/y", 0, 0, -1))
    assert watch.seen.written == ["/elsewhere/x", "/elsewhere/y"]


def test_the_answers_of_samples_are_right_and_every_sample_has_both_splits(tmp_path: Path) -> None:
    for name in ("training_jsonl", "sft_chats", "packed_chats", "preference_pairs", "rl_prompts"):
        folder = step_subject.write_sample(name, tmp_path / name)
        assert folder is not None
        rows = (folder / "train.jsonl").read_text().splitlines()
        assert len(rows) == step_subject.ROWS == len((folder / "validation.jsonl").read_text().splitlines())
    for line in (tmp_path / "preference_pairs/train.jsonl").read_text().splitlines():
        pair = json.loads(line)
        number = int(pair["prompt"].split()[2])
        assert (pair["chosen"], pair["rejected"]) == (f"It is {2 * number}.", f"It is {2 * number + 1}.")
    for line in (tmp_path / "sft_chats/train.jsonl").read_text().splitlines():
        question, answer = json.loads(line)["messages"]
        assert answer["content"] == f"It is {2 * int(question['content'].split()[2])}."
    for line in (tmp_path / "rl_prompts/train.jsonl").read_text().splitlines():
        row = json.loads(line)
        assert row["expected_answer"] == str(2 * int(row["question"].split()[2]))
    assert step_subject.write_sample("no_such_type", tmp_path / "none") is None
