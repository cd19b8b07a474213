"""Which home is meant, where this user's own things lie, and what a local home does with its folders."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemotron_steps.artifacts.backend import Backend, default_cache, open_backend


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


def test_what_is_this_users_own_lies_in_the_cache_that_was_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEPS_CACHE", str(tmp_path / "steps"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    for home in (str(tmp_path / "home"), "memory://a-home"):
        assert open_backend(home, tmp_path / "mine").private == tmp_path / "mine"
        assert open_backend(home).private == tmp_path / "steps"
    assert Backend(tmp_path, tmp_path / "mine").private == tmp_path / "mine"
    monkeypatch.setenv("STEPS_CACHE", "")
    assert default_cache() == tmp_path / "xdg/nemotron_steps"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert default_cache() == tmp_path / "user/.cache/nemotron_steps"


def staged(folder: Path, text: str, *, committed: bool = True) -> Path:
    folder.mkdir(parents=True)
    (folder / "train.jsonl").write_text(text)
    if committed:
        (folder / "artifact.json").write_text("{}")
    return folder


def test_what_is_committed_stays_unless_it_is_corrupt(tmp_path: Path) -> None:
    backend = Backend(tmp_path / "home")
    for text, replace, found in (("first", False, "first"), ("second", False, "first"), ("third", True, "third")):
        folder = staged(tmp_path / text, text)
        backend.commit_tree(folder, "objects/x", replace=replace)
        file = tmp_path / "home/objects/x/train.jsonl"
        assert file.read_text() == found and not file.stat().st_mode & 0o222 and not folder.exists()
    assert backend.names("objects") == ["x"]
