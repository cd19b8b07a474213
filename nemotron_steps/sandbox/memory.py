"""The memory that the programs of one sandbox hold: bounded by a cgroup (version 2) where this process may make one,
counted where it may not, as in most containers and jobs (docs/sandbox.md says what counts)."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

INODE_BYTES = 1024
"""What an empty file costs the kernel; tmpfs does not count it in its size."""
SOCKET_BYTES = 208 * 1024
"""Default bound of what waits in one socket (net.core.wmem_default)."""
STACK_BYTES = 16 * 1024

ROOT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")
EMPTY_S = 5.0
"""For the kernel to take down the processes of a run that was killed."""

Fields = Mapping[str, int]


class TreeMemory:
    """The processes of a sandbox, seen through its own /proc. FileNotFoundError, ProcessLookupError: it is over."""

    def __init__(self, pid: int, folders: tuple[str, ...]) -> None:
        with ExitStack() as stack:
            root = os.open(f"/proc/{pid}/root", os.O_PATH | os.O_DIRECTORY)
            stack.callback(os.close, root)
            self._proc = os.open("proc", os.O_RDONLY | os.O_DIRECTORY, dir_fd=root)
            stack.callback(os.close, self._proc)
            self._folders = []
            for folder in folders:
                self._folders.append(os.open(folder.lstrip("/"), os.O_PATH | os.O_DIRECTORY, dir_fd=root))
                stack.callback(os.close, self._folders[-1])
            self._close = stack.pop_all().close

    def held(self, limit: int) -> int:
        """Bytes held; exact, page tables walked, only where the quick sum, which counts forks twice, passes `limit`."""
        stats = [os.fstatvfs(folder) for folder in self._folders]
        shared = sum(s.f_frsize * (s.f_blocks - s.f_bfree) + INODE_BYTES * (s.f_files - s.f_ffree) for s in stats)
        with suppress(FileNotFoundError, ProcessLookupError):
            shared += SOCKET_BYTES * self._fields("1/net/sockstat").get("sockets", 0)
        quick = shared + sum(_kernel(status) + _pages(status) for _, status in self._processes())
        if quick <= limit:
            return quick
        exact = shared
        for pid, status in self._processes():
            exact += _kernel(status)
            try:
                rollup = self._fields(f"{pid}/smaps_rollup")
                exact += 1024 * (rollup.get("Pss_Anon", rollup.get("Pss", 0)) + rollup.get("SwapPss", 0))
            except PermissionError:
                exact += _pages(status)
            except (FileNotFoundError, ProcessLookupError):
                continue
        return exact

    def close(self) -> None:
        """Let go of the sandbox's folders, which live on while they are held open."""
        self._close()

    def _processes(self) -> Iterator[tuple[str, Fields]]:
        for name in os.listdir(self._proc):
            if name.isdigit():
                # It may end at any moment.
                with suppress(FileNotFoundError, ProcessLookupError):
                    yield name, self._fields(f"{name}/status")

    def _fields(self, path: str) -> Fields:
        descriptor = os.open(path, os.O_RDONLY, dir_fd=self._proc)
        try:
            text = os.read(descriptor, 65536).decode(errors="replace")
        finally:
            os.close(descriptor)
        found = {}
        for line in text.splitlines():
            name, _, value = line.partition(":")
            words = value.removesuffix("kB").split()
            if words and words[-1].isdigit():
                found[name] = int(words[-1])
        return found


def _pages(status: Fields) -> int:
    return 1024 * (status.get("RssAnon", 0) + status.get("VmSwap", 0))


def _kernel(status: Fields) -> int:
    return 1024 * status.get("VmPTE", 0) + STACK_BYTES * status.get("Threads", 0)


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
