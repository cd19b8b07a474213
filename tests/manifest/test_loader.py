"""Mistakes in a manifest are named with file and line, all at once; what tables and choices mean."""

from pathlib import Path

import pytest

from nemotron_steps.config.families import FAMILIES
from nemotron_steps.errors import ManifestError
from nemotron_steps.manifest.loader import parse_pipeline, parse_step, read_toml
from nemotron_steps.manifest.models import Parameter


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


def test_a_choice_is_neither_another_kind_of_value_nor_the_word_null() -> None:
    parameter = Parameter(name="a.b", choices=(1, 0.5, "null", "off"))
    assert [value for value in (1, True, 0.5, None, "null", "off", False, 0) if parameter.allows(value)] == [
        *(1, 0.5, None, "off")
    ]
    assert Parameter(name="a.b").allows(True)


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
    assert [(problem.what, problem.hints[-1]) for problem in problems] == [
        ("unknown key 'stages[0].confg'", "did you mean 'config'?")
    ]
    (tmp_path / "p.toml").write_text('stages = []\n[pipeline]\nname = "p"\n')
    _, problems = parse_pipeline(read_toml(tmp_path / "p.toml"))
    assert [problem.what for problem in problems] == ["'stages' has the wrong type"]
