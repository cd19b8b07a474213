"""Importing another package's module: what it prints and raises stays its own, and is told by its line."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nemotron_steps.errors.plugins import PluginImportError, load_object
from nemotron_steps.stopping import interruptible


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Path]]:
    """Writes a module of a plugin, and forgets it afterwards."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(name: str, text: str) -> Path:
        (tmp_path / f"{name}.py").write_text(text)
        return tmp_path / f"{name}.py"

    yield write
    for name in [name for name in sys.modules if name.startswith("toy_plugin")]:
        del sys.modules[name]


def test_what_a_module_prints_is_no_output_and_names_reach_inside(
    written: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    written("toy_plugin", "print('hello')\nclass A:\n    class B:\n        c = 3\n")
    assert load_object("toy_plugin:A.B.c") == 3
    assert capsys.readouterr() == ("", "hello\n")
    with pytest.raises(AttributeError):
        load_object("toy_plugin:A.C")


@pytest.mark.parametrize("raising", ["raise ValueError('no')", "raise SystemExit('no')", "import toy_plugin_absent"])
def test_what_a_module_raises_is_told_by_the_innermost_line_that_raised_it(
    raising: str, written: Callable[..., Path]
) -> None:
    inner = written("toy_plugin_inner", f"def broken():\n    {raising}\n")
    written("toy_plugin", "import toy_plugin_inner\ntoy_plugin_inner.broken()\n")
    with pytest.raises(PluginImportError) as caught:
        load_object("toy_plugin:A")
    assert (caught.value.name, caught.value.line) == ("toy_plugin", f"{inner}:2")


@pytest.mark.parametrize("becomes", ["pass", "raise ImportError", "raise ModuleNotFoundError(name='toy_plugin')"])
def test_an_interrupt_that_a_module_swallows_or_makes_another_error_of_is_still_one(
    becomes: str, written: Callable[..., Path]
) -> None:
    text = f"import signal\ntry:\n    signal.raise_signal(signal.SIGINT)\nexcept BaseException:\n    {becomes}\na = 1\n"
    written("toy_plugin", text)
    with pytest.raises(KeyboardInterrupt), interruptible():
        load_object("toy_plugin:a")
    sys.modules.pop("toy_plugin", None)
    text = text.replace("signal.raise_signal(signal.SIGINT)", "raise KeyboardInterrupt")
    written("toy_plugin_alone", text)
    if becomes == "pass":  # nobody asked
        assert load_object("toy_plugin_alone:a") == 1
