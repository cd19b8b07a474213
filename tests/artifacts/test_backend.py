"""Which home is meant, where this user's own things lie, and what a local home does with its folders."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemotron_steps.artifacts.backend import Backend, default_cache, open_backend
from nemotron_steps.errors import StorageError


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


def test_a_file_is_no_home(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("x")
    with pytest.raises(StorageError, match="not a folder") as caught:
        open_backend(tmp_path / "home")
    assert caught.value.where == str(tmp_path / "home")


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


def test_names_are_sorted_without_the_hidden_ones_and_a_file_has_none(tmp_path: Path) -> None:
    backend = Backend(tmp_path)
    expected = [f"{number:02}" for number in range(20)]
    for name in (*reversed(expected), ".hidden"):
        backend.write(f"names/{name}", b"x")
    assert backend.names("names") == expected
    assert backend.names("names/01") == [] == backend.names("nothing")
    assert backend.read("names/01/more") is None and backend.read("names/more") is None


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


def test_a_folder_in_the_way_that_nobody_committed_is_an_error(tmp_path: Path) -> None:
    staged(tmp_path / "home/objects/x", "somebody's", committed=False)
    with pytest.raises(OSError):
        Backend(tmp_path / "home").commit_tree(staged(tmp_path / "mine", "mine"), "objects/x")
    assert (tmp_path / "home/objects/x/train.jsonl").read_text() == "somebody's" and (tmp_path / "mine").exists()
