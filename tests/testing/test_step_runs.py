"""What the checks that run a step find in its processes, told here without a run."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nemotron_steps.errors import StepFailedError
from nemotron_steps.testing import step_runs, step_subject
from nemotron_steps.testing.step_subject import CANARY, Ran, tree_of
from nemotron_steps.testing.suite import NotApplicable, Unmet
from nemotron_steps.testing.watching import Watch


def ran(*commands: Mapping[str, Any], code: int = 0, home: Path = Path(), **seen: Any) -> Ran:
    """A process whose commands printed this."""
    told = [{"code": told.get("code", 0), "out": json.dumps(told), "err": ""} for told in commands]
    return Ran(home, told, {"writes_inside": 2, **seen}, code, "died")


def failed(what: str, code: str = "E300") -> dict[str, Any]:
    return {"error": {"code": code, "what": what, "where": None, "found": None}}


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


def test_only_a_step_that_left_something_wrong_is_judged_by_its_outputs() -> None:
    def step(told: Mapping[str, Any]) -> Any:
        return SimpleNamespace(manifest=SimpleNamespace(step=SimpleNamespace(entry="m:f")), first=ran(told))

    step_runs.runs(step({"steps": []}))
    step_runs.runs(step(failed("the step left a file open", StepFailedError.code)))
    for wrong in (failed("the step died", StepFailedError.code), failed("the step left a file", "E1")):
        with pytest.raises(Unmet, match="the step"):
            step_runs.runs(step(wrong))
    problem = {"code": "E7", "what": "no model", "where": "a.yaml:1", "found": "x", "hints": ["take one"]}
    plan = {"error": {"code": "E2", "what": "2 problems", "where": None, "found": None, "problems": [problem]}}
    with pytest.raises(Unmet, match="E7: no model"):
        step_runs.runs(step(plan))
    with pytest.raises(Unmet, match="died"):
        step_runs.runs(SimpleNamespace(manifest=step({}).manifest, first=ran()))  # type: ignore[arg-type]


def test_an_input_that_is_otherwise_than_before_is_found(tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    file = tmp_path / "rows/train.jsonl"
    file.write_text("{}\n")
    fed = {"rows": tmp_path / "rows"}
    step: Any = SimpleNamespace(fed=fed, fed_before={"rows": tree_of(fed["rows"])}, first=ran(written=[]))
    step_runs.inputs_stay_as_they_are(step)
    file.write_text("[]\n")
    with pytest.raises(Unmet, match="'rows' is otherwise"):
        step_runs.inputs_stay_as_they_are(step)
    step.first = ran(written=[str(file)])
    with pytest.raises(Unmet, match="writes to its inputs"):
        step_runs.inputs_stay_as_they_are(step)
    step.fed = {}
    with pytest.raises(NotApplicable):
        step_runs.inputs_stay_as_they_are(step)


def test_a_secret_is_found_however_deep_in_the_home(tmp_path: Path) -> None:
    step: Any = SimpleNamespace(first=ran(home=tmp_path))
    (tmp_path / "runs/one").mkdir(parents=True)
    (tmp_path / "runs/one/log.txt").write_text("nothing")
    step_runs.keeps_secrets_out(step)
    (tmp_path / "runs/one/log.bin").write_bytes(b"\xff" + CANARY.encode() + b"\0")
    with pytest.raises(Unmet, match="KIT_API_KEY is written down"):
        step_runs.keeps_secrets_out(step)


@pytest.mark.parametrize(
    ("stopped", "found"),
    [
        (ran({"code": 130}), None),
        (ran({"code": 0}), "exit code 0"),
        (ran({"code": 1}), "exit code 1"),
        (ran(code=-15), "exit code -15"),
    ],
)
def test_a_step_that_is_asked_to_stop_ends_as_interrupted(stopped: Ran, found: str | None, tmp_path: Path) -> None:
    asked = []

    def process(name: str, commands: Any, **given: Any) -> Ran:
        asked.append((given["at_write"], given["signal"]))
        return stopped

    step: Any = SimpleNamespace(first=ran(), folder=tmp_path, words=lambda home: ["run"], process=process)
    if found is None:
        step_runs.stops_when_asked(step)
    else:
        with pytest.raises(Unmet, match="goes on after SIGTERM") as unmet:
            step_runs.stops_when_asked(step)
        assert found in str(unmet.value) or found in str(unmet.value.found)
    assert asked == [(2, signal.SIGTERM)]
    step.first = ran(writes_inside=0)
    with pytest.raises(NotApplicable):
        step_runs.stops_when_asked(step)


def killed(tmp_path: Path, last: Ran, *codes: int, digest: str = "a", writes: int = 2) -> list[Any]:
    """How a step was killed that ends so, is resumed so and makes files of that digest."""
    asked: list[Any] = []
    ends = iter(codes)
    first = ran(writes_inside=writes)

    def process(name: str, commands: Any, **given: Any) -> Ran:
        asked.append({key: value for key, value in given.items() if key != "home"})
        return last if name == "resumed" else ran(code=next(ends))

    step: Any = SimpleNamespace(
        first=first,
        folder=tmp_path,
        words=lambda home: ["run"],
        process=process,
        digests=lambda of: {"rows": "a" if of is first else digest},
    )
    step_runs.resumes_after_a_kill(step)
    return asked


def test_a_step_is_killed_at_its_last_file_and_as_it_returns_and_then_makes_the_same(tmp_path: Path) -> None:
    fine = ran({"steps": []})
    assert killed(tmp_path, fine, -9, -9) == [{"at_write": 2}, {"at_return": True}, {}]
    assert killed(tmp_path, fine, -9, writes=0) == [{"at_return": True}, {}]
    for codes in ((0, -9), (-9, 0), (-15, -9)):
        with pytest.raises(Unmet, match="did not reach the point"):
            killed(tmp_path, fine, *codes)
    for last in (ran(failed("died again")), ran()):
        with pytest.raises(Unmet, match=r"after a kill the step fails: .*died"):
            killed(tmp_path, last, -9, -9)
    with pytest.raises(Unmet, match="makes something else"):
        killed(tmp_path, fine, -9, -9, digest="b")


@pytest.mark.parametrize(
    ("second", "found"),
    [
        ({"a": "1", "b": "2"}, None),
        ({"a": "1", "b": "3"}, "differ in b"),
        ({"b": "2"}, "differ in a"),
        ({}, "differ in a, b"),
    ],
)
def test_outputs_that_differ_or_are_missing_in_another_home_are_named(
    second: dict[str, str], found: str | None
) -> None:
    first, other = ran({"steps": []}), ran({"steps": []})
    made = {id(first): {"a": "1", "b": "2"}, id(other): second}
    step: Any = SimpleNamespace(first=first, second=other, digests=lambda of: made[id(of)])
    if found is None:
        step_runs.same_seed_same_outputs(step)
    else:
        with pytest.raises(Unmet, match=found):
            step_runs.same_seed_same_outputs(step)
    for fails in (ran(failed("no folder")), ran()):
        step.second = fails
        with pytest.raises(Unmet, match=r"fails in another home: (no folder|.*died)"):
            step_runs.same_seed_same_outputs(step)


def test_a_second_run_does_nothing_a_first_one_is_quick_and_says_what_it_did() -> None:
    def step(state: str = "cached", summary: Any = None, seconds: float = 1.0) -> Any:
        made = {"step": "toy", "state": "done", "summary": summary or {}, "seconds": seconds}
        told = ran({"steps": [{"step": "other"}, made]}, {"steps": [{"step": "toy", "state": state}]})
        return SimpleNamespace(first=told, manifest=SimpleNamespace(id="toy"), seconds=1.0)

    step_runs.a_second_run_is_cached(step())
    step_runs.is_quick(step())
    step_runs.says_what_it_did(step(summary={"rows": 1}))
    with pytest.raises(Unmet, match="it done"):
        step_runs.a_second_run_is_cached(step("done"))
    with pytest.raises(Unmet, match=r"takes 1\.5 s, of 1\.0 s"):
        step_runs.is_quick(step(seconds=1.5))
    with pytest.raises(Unmet, match="no summary"):
        step_runs.says_what_it_did(step())


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
