"""Which modules a step's code is: every form of import is followed, layers that only carry data are not."""

from collections.abc import Callable
from pathlib import Path

import pytest

from nemotron_steps.runs.code_digest import Code, import_closure

FILES = ("__init__", "x", "y", "sub/__init__", "deep/__init__", "deep/er/__init__", "deep/er/z")
OWN = {"followedpack", "followedpack.sub", "followedpack.sub.a"}
"""A module, and the packages that are imported with it."""


@pytest.fixture
def closure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], set[str]]:
    """The import closure of `followedpack.sub.a`, a module with this source."""
    root = tmp_path / "followedpack"
    for name in FILES:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / f"{name}.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))

    def closure(source: str) -> set[str]:
        (root / "sub" / "a.py").write_text(source)
        return set(import_closure("followedpack.sub.a"))

    return closure


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("", ()),
        ("import followedpack.x as x, followedpack.y as y", ("x", "y")),
        ("from .. import x as one, y as other", ("x", "y")),
        ("from ..deep.er import z", ("deep", "deep.er", "deep.er.z")),
        ("def f():\n    from followedpack.deep import er\n", ("deep", "deep.er")),
        ("LAZY = 'followedpack.deep.er.z:Thing'", ("deep", "deep.er", "deep.er.z")),
        ("from followedpack.x import y", ("x",)),
    ],
)
def test_every_form_of_import_is_followed(closure: Callable[[str], set[str]], source: str, found: tuple[str, ...]):
    assert closure(source) == OWN | {f"followedpack.{name}" for name in found}


@pytest.mark.parametrize("layer", ["api", "runs", "manifest", "resolver", "cli", "errors", "testing"])
def test_what_only_carries_data_is_no_part_of_a_steps_code(closure: Callable[[str], set[str]], layer: str):
    found = closure(f"import nemotron_steps.{layer}")
    assert not [name for name in found if name.startswith(f"nemotron_steps.{layer}")]


def test_the_engine_is_part_of_the_code_of_a_step_of_another_package(closure: Callable[[str], set[str]]):
    assert "nemotron_steps.sandbox.memory" in closure("from nemotron_steps.sandbox import memory")


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package `closurepack`: a → b → c, d named in a string, e unrelated."""
    root = tmp_path / "closurepack"
    (root / "sub").mkdir(parents=True)
    files = {
        "__init__.py": "",
        "a.py": "from closurepack.b import (\n    x,  # a comment, with commas\n    y,\n)\nimport json",
        "b.py": "x = 1\ndef y():\n    from .sub import c\n    return c",
        "sub/__init__.py": "from .h import i\nREGISTRY = {'d': 'closurepack.sub.d:Thing'}",
        "sub/c.py": "from . import f as g",
        "sub/d.py": "raise RuntimeError('must not be imported')",
        "sub/f.py": "",
        "sub/h.py": "i = 1",
        "e.py": "",
    }
    for name, source in files.items():
        (root / name).write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    return root


def code_digest(module: str) -> str:
    code = Code()
    code.add_module(module)
    return str(sorted((name, sorted(file.read_text() for file in files)) for name, files in code.files.items()))


@pytest.mark.parametrize("name", ["kernel.c", "kernel.h"])
def test_code_digest_changes_with_the_c_sources_beside_what_is_imported(package: Path, name: str) -> None:
    (package / "sub" / name).write_text("int one;")
    before = code_digest("closurepack.a")
    (package / "sub" / name).write_text("int two;")
    assert code_digest("closurepack.a") != before


def test_closure_of_a_built_in_step_has_the_engine_and_not_the_runner() -> None:
    closure = import_closure("nemotron_steps.steps.grpo")
    assert "nemotron_steps.engine.losses.policy_gradient" in closure and "nemotron_steps.config.schema.rl" in closure
    assert not any(name.startswith(("nemotron_steps.runs", "nemotron_steps.cli")) for name in closure)
