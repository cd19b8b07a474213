"""A cgroup (version 2) for the memory of one run, where this process may make one.

It is made beside this process's own group, so that whatever bounds that one's parent (a job's limits) bounds the
sandbox as well, and memory control is on there already. In most containers and jobs it may not: `memory` watches then.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")
EMPTY_S = 5.0
"""For the kernel to take down the processes of a run that was killed."""


class MemoryGroup:
    """A control group with a memory limit; whoever joins it is charged for all that the kernel holds for it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def procs(self) -> str:
        """The file to which a process writes 0 to join."""
        return str(self._folder / "cgroup.procs")

    @staticmethod
    @contextmanager
    def try_to_make(memory_bytes: int) -> Iterator[MemoryGroup | None]:
        """A group for one run, removed at the end with everything in it; None where there can be none."""
        parent = _parent()
        if parent is None:
            yield None
            return
        folder = parent / f"nemotron-steps-{os.getpid()}-{secrets.token_hex(4)}"
        try:
            folder.mkdir()
        except OSError:
            yield None
            return
        try:
            group: MemoryGroup | None = MemoryGroup(folder)
            try:
                (folder / "memory.max").write_text(str(memory_bytes))
                (folder / "memory.oom.group").write_text("1")
                with suppress(FileNotFoundError):  # without swap accounting there is no such file
                    (folder / "memory.swap.max").write_text("0")
            except OSError:
                group = None
            yield group
        finally:
            _remove(folder)

    def was_full(self) -> bool:
        """Whether the kernel killed because of the limit."""
        events = dict(line.split() for line in (self._folder / "memory.events").read_text().splitlines())
        return int(events["oom_kill"]) > 0


def _parent() -> Path | None:
    """The folder of the group above this process's own, if memory is controlled there and groups may be made."""
    try:
        lines = OWN.read_text().splitlines()
    except OSError:
        return None
    own = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), None)
    if own is None or not (ROOT / "cgroup.controllers").exists():
        return None
    parent = (ROOT / own).parent if own else ROOT
    try:
        controlled = (parent / "cgroup.subtree_control").read_text().split()
    except OSError:
        return None
    writable = os.access(parent, os.W_OK) and os.access(parent / "cgroup.procs", os.W_OK)
    return parent if "memory" in controlled and writable else None


def _remove(folder: Path) -> None:
    with suppress(OSError):
        (folder / "cgroup.kill").write_text("1")
    until = time.monotonic() + EMPTY_S
    while True:
        try:
            folder.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.005)
