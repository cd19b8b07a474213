"""Which reward functions a fresh process finds by the name of their module."""

from __future__ import annotations

import importlib
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nemotron_steps.api import functions
from nemotron_steps.api.functions import function_reference
from nemotron_steps.errors import ConfigError


@pytest.fixture
def score(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """A function of a package that only this process's sys.path leads to."""
    package = tmp_path / "lib" / "toy_rewards_of_a_path"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "own.py").write_text("def score(completions, **columns):\n    return [0.0 for _ in completions]\n")
    monkeypatch.syspath_prepend(str(tmp_path / "lib"))
    monkeypatch.setattr(functions.sysconfig, "get_path", lambda name: str(tmp_path / name))
    known = sysconfig.get_paths()
    monkeypatch.setattr(functions.sysconfig, "get_paths", lambda: known)
    (tmp_path / "purelib").mkdir()
    before = set(sys.modules)
    yield importlib.import_module("toy_rewards_of_a_path.own").score
    for name in set(sys.modules) - before:
        if name.startswith("toy_rewards_of_a_path"):
            del sys.modules[name]


NAME = "toy_rewards_of_a_path.own:score"


def test_a_package_that_only_this_process_finds_is_refused_with_what_would_lead_to_it(score, tmp_path):
    with pytest.raises(ConfigError) as caught:
        function_reference(score, tmp_path / "home", 2)
    assert caught.value.where == "rewards[2]" and caught.value.found == str(tmp_path / "lib")
    assert caught.value.hints[1] == f"pip install -e {tmp_path / 'lib'}"


def test_a_package_of_the_working_folder_or_of_pythonpath_is_found(score, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"/elsewhere:{tmp_path / 'lib'}")
    assert function_reference(score, tmp_path / "home") == NAME
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.chdir(tmp_path / "lib")
    assert function_reference(score, tmp_path / "home") == NAME


def test_a_package_is_found_where_its_installer_made_a_finder_for_it(score, tmp_path, monkeypatch):
    finder = type("Finder", (), {"__module__": "__editable___toy_finder"})()
    monkeypatch.setattr(sys.modules["toy_rewards_of_a_path"].__spec__, "loader", finder)
    assert function_reference(score, tmp_path / "home") == NAME


@pytest.mark.parametrize(
    ("lines", "found"),
    [("/other\n{lib}\nimport x\n", True), ("{lib}/deeper\n", False), ("/root{lib}\n", False), ("", False)],
)
@pytest.mark.parametrize("folder", ["purelib", "platlib"])
def test_a_package_is_found_where_a_line_of_a_pth_file_is_its_folder(lines, found, folder, score, tmp_path):
    (tmp_path / folder).mkdir(exist_ok=True)
    (tmp_path / folder / "editable.pth").write_text(lines.format(lib=tmp_path / "lib"))
    if found:
        assert function_reference(score, tmp_path / "home") == NAME
    else:
        with pytest.raises(ConfigError):
            function_reference(score, tmp_path / "home")


def test_a_function_of_a_packages_own_file_goes_by_the_package(score, tmp_path, monkeypatch):
    package = sys.modules["toy_rewards_of_a_path"]
    Path(package.__file__).write_text("def whole(completions, **columns):\n    return [1.0 for _ in completions]\n")
    package = importlib.reload(package)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "lib"))
    assert function_reference(package.whole, tmp_path / "home") == "toy_rewards_of_a_path:whole"
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "lib" / "toy_rewards_of_a_path"))
    with pytest.raises(ConfigError) as caught:
        function_reference(package.whole, tmp_path / "home")
    assert caught.value.found == str(tmp_path / "lib")


def test_what_has_a_state_is_named_in_the_function_that_is_hinted(tmp_path):
    class Judge:
        def __call__(self, completions, **columns):
            return [0.0 for _ in completions]

    for given, name in ((Judge(), "Judge"), (Judge, "type"), (len, "len")):
        with pytest.raises(ConfigError) as caught:
            function_reference(given, tmp_path, 1)
        assert (caught.value.where, caught.value.found) == ("rewards[1]", name)


def test_a_function_that_was_written_down_is_written_once(tmp_path):
    made = [function_reference(lambda completions, **columns: [2.0 for _ in completions], tmp_path, n) for n in (3, 3)]
    (file,) = tmp_path.iterdir()
    assert made == [f"{file}:reward_3"] * 2
    file.write_text("def reward_3(): ...\n")  # what its digest names is not looked at again
    function_reference(lambda completions, **columns: [2.0 for _ in completions], tmp_path, 3)
    assert file.read_text() == "def reward_3(): ...\n"
