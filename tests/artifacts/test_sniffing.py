"""Which type a user's file or folder is, which validator looks at it, and what is read of data sets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nemotron_steps.artifacts import validators
from nemotron_steps.artifacts.validators import declare, has_validator, jsonl_files, sniff_type, validate
from nemotron_steps.errors import ArtifactError

CHAT = '{"messages": [{"role": "assistant", "content": "4"}]}\n'
PROMPT = '{"responses_create_params": {"input": "x"}, "agent_ref": {"name": "NAME"}}\n'


def write(folder: Path, *names: str, text: str = "{}\n") -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).mkdir() if name.endswith("/") else (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (["hf/x", "weights/x", "config.json"], "checkpoint_megatron"),
        (["hf/x", "config.json"], "checkpoint_hf"),
        (["weights/x", "config.json"], "checkpoint_hf"),
        (["hf/x"], None),
        (["adapter_config.json", "config.json", "tokenizer.json"], "adapter"),
        (["config.json", "train.jsonl"], "checkpoint_hf"),
        (["deep/train.jsonl", "report.json"], "training_jsonl"),
        (["report.json"], "eval_report"),
        (["folder.jsonl/", "report.json"], "eval_report"),
        (["notes.md"], None),
    ],
)
def test_a_folder_is_what_its_most_telling_file_says(names: list[str], kind: str | None, tmp_path: Path) -> None:
    assert sniff_type(write(tmp_path, *names)) == kind


def test_a_file_is_rows_by_its_name_and_the_first_file_with_a_row_tells_which(tmp_path: Path) -> None:
    write(tmp_path, "a.jsonl", text="")
    assert sniff_type(tmp_path / "a.jsonl") == "training_jsonl" == sniff_type(tmp_path)
    write(tmp_path, "b.jsonl", "b.json", text=CHAT)
    write(tmp_path, "c.jsonl")
    assert sniff_type(tmp_path) == "sft_chats" == sniff_type(tmp_path / "b.jsonl")
    assert sniff_type(tmp_path / "b.json") is None
    assert [path.name for path in jsonl_files(tmp_path)] == ["a.jsonl", "b.jsonl", "c.jsonl"]
    assert jsonl_files(tmp_path / "b.json") == [tmp_path / "b.json"]


def test_rows_are_counted_by_split_and_one_of_them_is_enough(tmp_path: Path) -> None:
    write(tmp_path, "train.jsonl", "deep/part.jsonl", text="{}\n{}\n")
    write(tmp_path, "validation.jsonl", text="\n")
    assert validate("training_jsonl", tmp_path) == {"rows": {"train": 2, "validation": 0, "deep/part": 2}}
    assert validate("training_jsonl", tmp_path / "train.jsonl") == {"rows": {"train": 2}}
    with pytest.raises(ArtifactError, match="no rows"):
        validate("training_jsonl", tmp_path / "validation.jsonl")
    with pytest.raises(ArtifactError, match="no JSON Lines file"):
        validate("training_jsonl", tmp_path / "nothing")


def test_environments_are_sorted_and_each_named_once(tmp_path: Path) -> None:
    names = [f"n{number:02}" for number in range(20)]
    text = "".join(PROMPT.replace("NAME", name) for name in (*reversed(names), "n00"))
    assert validate("rl_prompts", write(tmp_path, "train.jsonl", text=text))["environments"] == names


@pytest.mark.parametrize(
    ("report", "metrics"),
    [
        ({"metrics": {"a": 1}, "b": 2}, {"a": 1}),
        ({"a": 0, "b": True, "c": "x"}, {"a": 0}),
        ({"metrics": {}, "b": 2}, None),
        ({"metrics": None, "b": 2}, None),
        ({"b": True}, None),
    ],
)
def test_a_report_has_metrics_of_its_own_or_numbers_at_the_top(
    report: dict[str, Any], metrics: dict[str, Any] | None, tmp_path: Path
) -> None:
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(report))
    (tmp_path / "report.json").write_text(json.dumps(report))
    for path in (file, tmp_path):
        if metrics is None:
            with pytest.raises(ArtifactError):
                validate("eval_report", path)
        else:
            assert validate("eval_report", path) == {"metrics": metrics}


def test_the_nearest_type_with_a_validator_has_its_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for name in ("own", "near", "far"):
        monkeypatch.setitem(validators._VALIDATORS, name, lambda folder, name=name: {"by": name})
    monkeypatch.setattr(validators, "_DECLARED", {})
    assert validate("own", tmp_path, ("near", "far")) == {"by": "own"}
    assert validate("none", tmp_path, ("none", "near", "far")) == {"by": "near"}
    declare({"near": "nowhere:at_all", "theirs": f"{__name__}:first"})
    assert validate("near", tmp_path) == {"by": "near"}, "a built-in type keeps its own"
    assert validate("theirs", tmp_path, ("near",)) == {"by": "first"}
    declare({"theirs": f"{__name__}:second"})
    assert validate("theirs", tmp_path) == {"by": "second"} and calls == []
    assert has_validator("near") and not has_validator("theirs")


def first(folder: Path) -> dict[str, Any]:
    return {"by": "first"}


def second(folder: Path) -> dict[str, Any]:
    return {"by": "second"}


def test_any_file_however_deep_makes_a_folder_an_artifact_of_a_type_that_asks_for_nothing(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="empty"):
        validate("anything", write(tmp_path, "deep/deeper/"))
    assert (
        validate("anything", write(tmp_path, "deep/deeper/x")) == {} == validate("anything", tmp_path / "deep/deeper/x")
    )
