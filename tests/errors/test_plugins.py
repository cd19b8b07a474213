"""Importing another package's module: what it prints and raises stays its own, and is told by its line."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace

import pytest

from nemotron_steps.errors import plugins
from nemotron_steps.errors.plugins import PluginImportError, load_object, noted
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


@pytest.mark.parametrize("reference", ["toy_plugin_absent:A", "toy_plugin_absent.deep:A"])
def test_a_module_that_is_not_installed_is_not_one_that_fails(reference: str) -> None:
    with pytest.raises(ModuleNotFoundError) as caught:
        load_object(reference)
    assert not isinstance(caught.value, PluginImportError)


def test_a_package_that_lacks_another_of_nearly_its_name_is_one_that_fails(written: Callable[..., Path]) -> None:
    path = written("toy_plugin_more", "import toy_plugin_mor\n")
    with pytest.raises(PluginImportError) as caught:
        load_object("toy_plugin_more:A")
    assert caught.value.line == f"{path}:1"


WAITS_UNTIL_IT_IS_NAMED = """
import sys, time
until = time.monotonic() + 20
while "still importing" not in sys.stderr.getvalue() and time.monotonic() < until:
    time.sleep(0.005)
"""


def test_a_module_that_takes_long_is_named_once_with_its_package(
    written: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plugins, "_LONG_S", 0.02)
    written("toy_plugin", WAITS_UNTIL_IT_IS_NAMED)
    assert load_object("toy_plugin:until") > 0
    assert capsys.readouterr() == ("", "still importing toy_plugin, of package toy_plugin …\n")


def test_a_module_that_does_not_take_long_is_not_named_and_nothing_waits_on(
    written: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    begun: list[threading.Timer] = []

    class Timer(threading.Timer):
        def start(self) -> None:
            begun.append(self)
            super().start()

    monkeypatch.setattr(threading, "Timer", Timer)
    written("toy_plugin", "a = 1")
    written("toy_plugin_raising", "raise ValueError")
    assert load_object("toy_plugin:a") == load_object("toy_plugin:a") == 1
    with pytest.raises(PluginImportError):
        load_object("toy_plugin_raising:a")
    assert len(begun) == 2  # none for what is imported already
    monkeypatch.setattr(plugins, "_OWN", "toy_plugin_own")
    written("toy_plugin_own", "a = 1")
    load_object("toy_plugin_own:a")
    assert len(begun) == 2  # none for a module of ours
    written("toy_plugin_owner", "a = 1")
    load_object("toy_plugin_owner:a")
    assert len(begun) == 3  # whose name only begins alike
    for timer in begun:
        timer.join(5)
        assert timer.daemon and not timer.is_alive()
    assert capsys.readouterr() == ("", "")


def test_an_interrupt_names_the_module_its_package_and_the_line(
    written: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    points = {
        "a-script": EntryPoint("a", "toy_plugin:main", "console_scripts"),
        "another": EntryPoint("a", "toy_plugin_inner:pack", "nemotron_steps.packs"),
        "toy-plugin": EntryPoint("a", "toy_plugin.code:A", "nemotron_steps.environments"),
    }
    installed = [SimpleNamespace(name=name, entry_points=[point]) for name, point in points.items()]
    monkeypatch.setattr("importlib.metadata.distributions", lambda: installed)
    path = written("toy_plugin", "import signal\nsignal.raise_signal(signal.SIGINT)\n")
    with pytest.raises(KeyboardInterrupt) as caught, interruptible():
        load_object("toy_plugin:a")
    assert noted(caught.value) == f" while toy_plugin, of package toy-plugin, was imported ({path}:2)"
    assert noted(KeyboardInterrupt()) == ""


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
