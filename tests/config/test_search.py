"""Where a step's configs are: under its pack's `configs/`, beside its manifest, at a path."""

from pathlib import Path

import pytest

from nemotron_steps.config.compose import Mount, SearchPath
from nemotron_steps.errors import ConfigError


def write(root: Path, *names: str, text: str = "steps: 2\n") -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_configs_beside_the_manifest_go_before_those_of_packs(tmp_path):
    own = write(tmp_path / "own", "rl/toy/tiny.yaml", "rl/toy/more.yaml")
    other = write(tmp_path / "other", "rl/toy/theirs.yaml", "rl/base/common.yaml")
    beside = write(tmp_path / "beside", "tiny.yaml")
    search = SearchPath("rl/toy", (own, other), beside)
    assert search.names() == ("more", "theirs", "tiny")
    assert [mount.folder for mount in search.mounts()] == [beside, own, other]
    assert search.locate("tiny") == ("rl/toy/tiny", search.mounts())
    with pytest.raises(ConfigError, match="no config 'none'") as caught:
        search.locate("none")
    assert (caught.value.expected, caught.value.hints) == ("more, theirs, tiny", ("steps show rl/toy   # its configs",))


def test_a_users_file_comes_first_and_the_files_beside_it_last(tmp_path, monkeypatch):
    root = write(tmp_path / "pack", "rl/toy/tiny.yaml")
    mine = write(tmp_path / "work", "mine.v2.yaml") / "mine.v2.yaml"
    search = SearchPath("rl/toy", (root,))
    monkeypatch.setenv("HOME", str(mine.parent))
    for written in (str(mine), "~/mine.v2.yaml"):
        name, (first, *between, last) = search.locate(written)
        assert name == "rl/toy/mine.v2.file" and first == Mount(name, mine.parent, mine)
        assert (first.path(name), first.path("rl/toy/other.file")) == (mine, None)
        assert (tuple(between), last) == (search.mounts(), Mount("rl/toy", mine.parent))
