"""Types of other packages bring a validator by name; one that is broken is named, and commits nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemotron_steps.artifacts import validators
from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.errors import ArtifactError, DataError, UnsupportedError

CODE = """
from nemotron_steps.errors import DataError

def check(folder):
    text = (folder / "a.txt").read_text()
    if text == "bad":
        raise DataError("the text is bad", where=str(folder))
    return {"letters": len(text)}

def gives_nothing(folder):
    return None
"""


@pytest.fixture
def declared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "toy_validators.py").write_text(CODE)
    (tmp_path / "toy_broken.py").write_text("import json\nraise RuntimeError('not today')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(validators, "_DECLARED", {})
    names = {"toy": "check", "toy_empty": "gives_nothing", "toy_gone": "gone"}
    validators.declare({name: f"toy_validators:{function}" for name, function in names.items()})


def folder(tmp_path: Path, text: str, name: str = "a.txt") -> Path:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / name).write_text(text)
    return tmp_path / "data"


def test_its_attributes_are_recorded_and_its_refusal_is_raised(tmp_path: Path, declared: None) -> None:
    store = ArtifactStore(tmp_path / "home")
    assert store.add(folder(tmp_path, "fine"), type_name="toy").attributes == {"letters": 4}
    (tmp_path / "data/a.txt").write_text("bad")
    with pytest.raises(DataError, match="the text is bad"):
        store.add(tmp_path / "data", type_name="toy")
    assert store.add(tmp_path / "data", type_name="other").type == "other"


def test_a_subtype_has_its_parents(tmp_path: Path, declared: None) -> None:
    assert validators.validate("toy_child", folder(tmp_path, "fine"), ("toy_child", "toy")) == {"letters": 4}


def test_a_validator_whose_module_fails_is_told_by_the_line_that_fails(tmp_path: Path, declared: None) -> None:
    validators.declare({"toy_broken": "toy_broken:check"})
    with pytest.raises(UnsupportedError, match="RuntimeError: not today") as raised:
        validators.validate("toy_broken", folder(tmp_path, "x"))
    assert raised.value.where == f"{tmp_path / 'toy_broken.py'}:2"


@pytest.mark.parametrize(
    ("type_name", "error", "message"),
    [
        ("toy", ArtifactError, "validator of type 'toy' failed: FileNotFoundError"),
        ("toy_empty", ArtifactError, "gives no attributes"),
        ("toy_gone", UnsupportedError, "validator of type 'toy_gone' cannot be imported"),
    ],
)
def test_a_broken_validator_is_named(
    tmp_path: Path, declared: None, type_name: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message) as raised:
        validators.validate(type_name, folder(tmp_path, "x", "b.txt"))
    assert "toy_validators:" in str(raised.value.where)
