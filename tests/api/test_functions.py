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
def test_a_package_is_found_where_a_line_of_a_pth_file_is_its_folder(lines, found, score, tmp_path):
    (tmp_path / "purelib" / "editable.pth").write_text(lines.format(lib=tmp_path / "lib"))
    if found:
        assert function_reference(score, tmp_path / "home") == NAME
    else:
        with pytest.raises(ConfigError):
            function_reference(score, tmp_path / "home")
