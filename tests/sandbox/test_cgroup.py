from pathlib import Path

import pytest

from nemotron_steps.sandbox import Limits, Outcome
from nemotron_steps.sandbox import memory as cgroup
from tests.sandbox.programs import MIB, run


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hierarchy in which this process is in /job/run, with memory controlled in /job."""
    (tmp_path / "job" / "run").mkdir(parents=True)
    (tmp_path / "cgroup.controllers").write_text("cpu memory\n")
    for folder in (tmp_path, tmp_path / "job"):
        (folder / "cgroup.subtree_control").write_text("cpu memory\n")
        (folder / "cgroup.procs").write_text("")
    (tmp_path / "own").write_text("0::/job/run\n")
    monkeypatch.setattr(cgroup, "ROOT", tmp_path)
    monkeypatch.setattr(cgroup, "OWN", tmp_path / "own")
    return tmp_path


@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("own", "4:memory:/job\n1:cpu:/\n"),  # version 1
        ("job/cgroup.subtree_control", "cpu\n"),
        ("job/cgroup.subtree_control", None),
        ("cgroup.controllers", None),  # a hybrid hierarchy
        ("job/cgroup.procs", None),  # not this process's to write
    ],
)
def test_where_memory_cannot_be_controlled_there_is_none(tree: Path, path: str, content: str | None) -> None:
    if content is None:
        (tree / path).unlink()
    else:
        (tree / path).write_text(content)
    assert cgroup._parent() is None
    with cgroup.MemoryGroup.try_to_make(MIB) as group:
        assert group is None


@pytest.mark.sandbox
@pytest.mark.skipif(cgroup._parent() is None, reason="this host makes no cgroup")
def test_the_kernel_stops_a_tree_that_holds_too_much_and_the_group_is_removed() -> None:
    parent = cgroup._parent()
    assert parent is not None
    code = "for _ in range(3): os.fork()\nkeep = b'x' * 60 * 2**20\ntime.sleep(5)"
    result = run(code, limits=Limits(wall_s=30, memory_bytes=128 * MIB))
    assert result.outcome is Outcome.MEMORY_LIMIT
    assert not list(parent.glob("nemotron-steps-*"))


def test_a_group_has_its_limits_says_whether_it_was_full_and_goes_with_its_run(tree: Path, monkeypatch) -> None:
    made = []

    def removed(folder: Path) -> None:
        made.append(({file.name: file.read_text() for file in folder.iterdir()}, folder.parent))

    monkeypatch.setattr(cgroup, "_remove", removed)
    with cgroup.MemoryGroup.try_to_make(7 * MIB) as group:
        assert group is not None
        folder = Path(group.procs).parent
        for kills, full in ((0, False), (1, True), (3, True)):
            (folder / "memory.events").write_text(f"low 0\noom 9\noom_kill {kills}\n")
            assert group.was_full() is full
        assert not made
    ((files, parent),) = made
    assert parent == tree / "job"
    assert {name: files[name] for name in files if name != "memory.events"} == {
        "memory.max": str(7 * MIB),
        "memory.oom.group": "1",
        "memory.swap.max": "0",
    }
