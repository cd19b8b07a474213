"""One segment of shared memory: the policy writes it, every generator of the machine maps it read-only.

The file is unlinked as soon as everyone has mapped it, so that nothing is left behind however the processes end. Until
then its writer holds a lock on it; one without a lock was left by a writer that was killed, and the next removes it.
"""

import contextlib
import fcntl
import mmap
import os
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch

from nemotron_steps.engine.weight_sync.plan import WeightPlan

_FOLDER = Path("/dev/shm")
_PREFIX = "nemotron_steps_weights_"


class SegmentWriter:
    """The sender's side."""

    def __init__(self, plan: WeightPlan) -> None:
        self._plan = plan
        self.path, self._descriptor = _create(max(1, plan.bytes))
        self._memory = mmap.mmap(self._descriptor, 0)
        self._buffer = torch.frombuffer(self._memory, dtype=torch.uint8)

    def write(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Replace the segment's contents. No one may be reading them."""
        for bucket in self._plan.buckets:
            self._plan.fill(bucket, self._buffer[bucket.start : bucket.start + bucket.bytes], weights)

    def unlink(self) -> None:
        """Remove the name; the memory lives as long as someone maps it."""
        os.unlink(self.path)
        os.close(self._descriptor)


class SegmentReader:
    """A receiver's side: read-only."""

    def __init__(self, plan: WeightPlan, path: str) -> None:
        self._plan = plan
        with open(path, "rb") as file:
            self._memory = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        with warnings.catch_warnings():
            # torch cannot mark a tensor read-only and says so; a write to it would end the process.
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            self._buffer = torch.frombuffer(self._memory, dtype=torch.uint8)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Views of the segment; valid until the next write."""
        for bucket in self._plan.buckets:
            yield from bucket.views(self._buffer[bucket.start : bucket.start + bucket.bytes])


def _create(size: int) -> tuple[str, int]:
    """A new file of `size` bytes in memory, or on disk where the memory file system is too small (containers)."""
    problem: OSError | None = None
    for folder in (_FOLDER, Path(tempfile.gettempdir())):
        if not folder.is_dir():
            continue
        for path_left in folder.glob(f"{_PREFIX}*"):
            _remove_if_left_behind(path_left)
        path, descriptor = _locked_file(folder)
        try:
            os.posix_fallocate(descriptor, 0, size)
        except OSError as error:
            os.close(descriptor)
            os.unlink(path)
            problem = error
        else:
            return path, descriptor
    raise problem or FileNotFoundError(str(_FOLDER))


def _locked_file(folder: Path) -> tuple[str, int]:
    while True:
        descriptor, path = tempfile.mkstemp(prefix=_PREFIX, dir=folder)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return path, descriptor
        os.close(descriptor)  # another writer took it for one left behind, before it was locked


def _remove_if_left_behind(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError, PermissionError, BlockingIOError), path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()
