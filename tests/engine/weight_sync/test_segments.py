"""Segments of shared memory: where they lie, and that nothing of them is left behind."""

import errno
import os
import tempfile
from pathlib import Path

import pytest
import torch

from nemotron_steps.engine.weight_sync import shared_memory
from nemotron_steps.engine.weight_sync.plan import WeightPlan
from nemotron_steps.engine.weight_sync.shared_memory import SegmentReader, SegmentWriter

GIVEN = [("a", torch.arange(3.0)), ("b", torch.ones(64))]
PLAN = WeightPlan.of(GIVEN)


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """Memory, and a disk beside it; neither has more room than `full` leaves."""
    found = {name: tmp_path / name for name in ("memory", "disk")}
    for folder in found.values():
        folder.mkdir()
    monkeypatch.setattr(shared_memory, "_FOLDER", found["memory"])
    monkeypatch.setattr(tempfile, "tempdir", str(found["disk"]))
    return found


def fill(monkeypatch: pytest.MonkeyPatch, *full: Path) -> None:
    allocate = os.posix_fallocate

    def limited(descriptor: int, start: int, size: int) -> None:
        if Path(os.readlink(f"/proc/self/fd/{descriptor}")).parent in full:
            raise OSError(errno.ENOSPC, "No space left on device")
        allocate(descriptor, start, size)

    monkeypatch.setattr(os, "posix_fallocate", limited)


def carries(writer: SegmentWriter, plan: WeightPlan = PLAN) -> bool:
    reader = SegmentReader(plan, writer.path)
    writer.unlink()
    writer.write(iter(GIVEN))
    return all(torch.equal(tensor, sent) for (_, tensor), (_, sent) in zip(reader.weights(), GIVEN, strict=True))


@pytest.mark.parametrize("without", ["room", "folder"])
def test_without_room_in_memory_it_is_on_disk(
    without: str, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    if without == "room":
        fill(monkeypatch, folders["memory"])
    else:
        folders["memory"].rmdir()
    writer = SegmentWriter(PLAN)
    assert Path(writer.path).parent == folders["disk"]
    assert without == "folder" or not list(folders["memory"].iterdir())
    assert carries(writer) and not list(folders["disk"].iterdir())


def test_without_room_anywhere_it_says_so_and_leaves_no_file(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(monkeypatch, *folders.values())
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="No space left"):
        SegmentWriter(PLAN)
    assert not any(list(folder.iterdir()) for folder in folders.values())
    assert len(os.listdir("/proc/self/fd")) == before
