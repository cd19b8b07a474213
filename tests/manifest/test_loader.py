"""A mistake in a manifest is named with its file and line, all of them at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemotron_steps.config.families import FAMILIES
from nemotron_steps.errors import ManifestError
from nemotron_steps.manifest import loader
from nemotron_steps.manifest.loader import parse_pipeline, parse_step, parse_types, read_toml
from nemotron_steps.manifest.models import Parameter
from nemotron_steps.manifest.pipeline_models import StageCheck


def mistakes(tmp_path: Path, text: str) -> list[tuple[int, str, tuple[str, ...]]]:
    """(line, sentence, hints) of every mistake in a step file."""
    path = tmp_path / "step.toml"
    path.write_text(text, encoding="utf-8")
    step, problems = parse_step(read_toml(path))
    assert (step is None) == bool(problems)
    found = []
    for problem in problems:
        file, _, line = str(problem.where).rpartition(":")
        assert file == str(path)
        found.append((int(line), problem.what, problem.hints))
    return found


def test_all_fields_are_read(tmp_path: Path) -> None:
    path = tmp_path / "full.toml"
    path.write_text(
        """
[step]
id = "x/y"
entry = "pkg.mod:run"
config_schema = "pkg.mod:Config"
tags = ["t"]
[[consumes]]
name = "prompts"
type = "rl_prompts"
attributes = { tokenizer = ["a", "b"] }
[consumes.bind]
"data.train.data_path" = "train-split.jsonl"
"data.validation.data_path" = "val-split.jsonl"
[[consumes]]
type = "checkpoint"
required = false
bind = "policy.checkpoint"
[[produces]]
type = "model"
inherits = "checkpoint"
[[parameters]]
name = "a.b"
default = 8
choices = [4, 8]
[[strategies]]
when = "w"
then = "t"
signal = "kl_spike"
override = "a.b*=2|4"
[[errors]]
name = "oom"
match = ["MemoryError"]
recovery = "r"
[[constraints]]
same = ["prompts.tokenizer", "checkpoint.tokenizer"]
[[models]]
name = "m"
default = true
min_gpus = 2
made_up = "kept"
[resources]
nodes = 2
[reference]
paper = "https://example.org"
[my_table]
anything = 1
"""
    )
    step, problems = parse_step(read_toml(path), pack="p")
    assert problems == () and step is not None
    assert step.inputs["prompts"].bindings == {
        "data.train.data_path": "train-split.jsonl",
        "data.validation.data_path": "val-split.jsonl",
    }
    assert step.inputs["checkpoint"].bindings == {"policy.checkpoint": ""}
    assert step.strategies[0].signal == ("kl_spike",)
    assert step.constraints[0].terms == (("prompts", "tokenizer"), ("checkpoint", "tokenizer"))
    assert step.extra == {"my_table": {"anything": 1}}
    assert step.models[0].model_extra == {"made_up": "kept"}
    assert step.where_input("checkpoint") == f"{path}:14"
    with pytest.raises(ValueError, match="frozen"):
        step.pack = "other"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "line", "what"),
    [
        ('[[consumes]]\ntype = "t"\n', 1, "'step' is missing"),
        ('[step]\nname = "x"\n', 1, "'step.id' is missing"),
        ('[step]\nid = "a"\n[[consumes]]\ntype = "t"\n[[consumes]]\ntype = "t"\n', 3, "two entries are named 't'"),
        ('[step]\nid = "a"\n[[produces]]\ntype = "t"\ninherits = "x"\n', 3, "inherits names no input port 'x'"),
        ('[step]\nid = "a"\n\n[[constraints]]\nsame = ["x.y", "z.y"]\n', 4, "is not PORT.ATTRIBUTE"),
        ('[step]\nid = "a"\n[[errors]]\nname = "e"\nrecovery = "r"\nmatch = ["("]\n', 3, "is not a regular expression"),
        ('[step]\nid = "a"\n[[strategies]]\nwhen="w"\nthen="t"\noverride = "no value"\n', 6, "cannot be pasted"),
        ('id = "a"\n[step]\nid = "a"\n', 1, "unknown key 'id' at the top"),
        ('[step]\nid = "a"\nid = "b"\n', 3, "not valid TOML"),
        ('[step\nid = "a"\n', 1, "not valid TOML"),
        ('[step]\nid = "a"\ntext = """never closed\n', 4, "not valid TOML"),
    ],
)
def test_mistakes(tmp_path: Path, text: str, line: int, what: str) -> None:
    try:
        found = mistakes(tmp_path, text)
    except ManifestError as error:
        found = [(int(str(error.where).rpartition(":")[2]), error.what, error.hints)]
    assert any(what in sentence and line == at for at, sentence, _ in found), found


def test_a_table_stands_for_its_names(tmp_path: Path) -> None:
    text = '[step]\nid = "x"\n[[consumes]]\ntype = "checkpoint_hf"\nattributes = {{ model_type = "@{}" }}\n'
    path = tmp_path / "step.toml"
    path.write_text(text.format("families"), encoding="utf-8")
    step, _ = parse_step(read_toml(path))
    assert step is not None and step.consumes[0].attributes == {"model_type": list(FAMILIES)}
    ((line, what, _),) = mistakes(tmp_path, text.format("family"))
    assert line >= 3 and "'@family' names no table; there is @families" in what


def test_a_file_that_is_not_text_is_a_manifest_error(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_bytes(b"[step]\nid = '\xff'\n")
    with pytest.raises(ManifestError, match="not UTF-8"):
        read_toml(path)
    with pytest.raises(ManifestError, match="cannot read"):
        read_toml(tmp_path / "absent.toml")


def test_types(tmp_path: Path) -> None:
    path = tmp_path / "types.toml"
    path.write_text('loose = 1\n[a]\nis_a = ["b"]\n[b]\nattributes = { x = "y" }\n[c]\nis_A = []\n')
    types, problems = parse_types(read_toml(path))
    assert set(types) == {"a", "b"}
    assert [(p.what, p.where) for p in problems] == [
        ("'loose' is not a type", f"{path}:1"),
        ("unknown key 'c.is_A'", f"{path}:7"),
    ]


@pytest.mark.parametrize(
    ("bounds", "holding"),
    [
        ({"at_least": 0}, [0, 1, 2, 3]),
        ({"at_most": 2}, [-1, 0, 1, 2]),
        ({"at_least": 1, "at_most": 2}, [1, 2]),
    ],
)
def test_a_check_holds_within_its_bounds_and_never_for_what_is_no_number(
    bounds: dict[str, float], holding: list[int]
) -> None:
    check = StageCheck(metric="reward", **bounds)
    assert [value for value in (-1, 0, 1, 2, 3, float("nan")) if check.holds(value)] == holding


def test_a_choice_is_neither_another_kind_of_value_nor_the_word_null() -> None:
    parameter = Parameter(name="a.b", choices=(1, 0.5, "null", "off"))
    assert [value for value in (1, True, 0.5, None, "null", "off", False, 0) if parameter.allows(value)] == [
        *(1, 0.5, None, "off")
    ]
    assert Parameter(name="a.b").allows(True)


def test_a_file_as_large_as_a_manifest_may_be_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "step.toml"
    path.write_text('[step]\nid = "a"\n')
    monkeypatch.setattr(loader, "LONGEST_FILE", path.stat().st_size)
    assert read_toml(path).data == {"step": {"id": "a"}}
    monkeypatch.setattr(loader, "LONGEST_FILE", path.stat().st_size - 1)
    with pytest.raises(ManifestError, match="not a manifest file") as caught:
        read_toml(path)
    assert caught.value.found == f"{path.stat().st_size} bytes"


def test_mistakes_of_several_kinds_are_told_together_and_each_once(tmp_path: Path) -> None:
    text = 'own = 1\n[step]\nid = "a"\n[[errors]]\nname = "e"\nrecovery = "r"\noverride = "no value"\n'
    assert [line for line, _, _ in mistakes(tmp_path, text)] == [1, 7]
    union = '[step]\nid = "a"\n[[consumes]]\ntype = "t"\nbind = 3\n'
    assert [(line, what) for line, what, _ in mistakes(tmp_path, union)] == [
        (5, "'consumes[0].bind' has the wrong type")
    ]
    stages = '[pipeline]\nname = "p"\n[[stages]]\nstep = "a"\nconfg = "x"\n'
    (tmp_path / "p.toml").write_text(stages)
    _, problems = parse_pipeline(read_toml(tmp_path / "p.toml"))
    assert [problem.what for problem in problems] == ["unknown key 'stages[0].confg'"]
    (tmp_path / "p.toml").write_text('stages = []\n[pipeline]\nname = "p"\n')
    _, problems = parse_pipeline(read_toml(tmp_path / "p.toml"))
    assert [problem.what for problem in problems] == ["'stages' has the wrong type"]
