"""Which home is meant."""

from pathlib import Path

import pytest

from nemotron_steps.artifacts.backend import open_backend


def test_the_home_is_the_argument_else_the_variable_else_a_folder_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STEPS_HOME", str(tmp_path / "variable"))
    assert open_backend().url == str(tmp_path / "variable")
    assert open_backend(tmp_path / "given").url == str(tmp_path / "given")
    for unset in (lambda: monkeypatch.setenv("STEPS_HOME", ""), lambda: monkeypatch.delenv("STEPS_HOME")):
        unset()
        assert open_backend().url == str(tmp_path / ".steps")


def test_a_home_is_a_path_from_here_from_the_users_folder_or_a_file_url(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    found = [open_backend(home).scratch for home in ("mine", "~/mine", f"file://{tmp_path}/mine")]
    assert found == [tmp_path / "mine", tmp_path / "user/mine", tmp_path / "mine"]
