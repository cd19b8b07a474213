"""How much memory the programs of one sandbox hold, where no cgroup counts it.

Counted: every process's own memory (with what is swapped out, page tables and stacks in the kernel), everything in the
sandbox's folders in memory, an allowance for its sockets. The seccomp filter refuses what would escape this count:
memfd, System V memory, shared anonymous and huge pages. What is left uncounted is small objects of the kernel.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress

INODE_BYTES = 1024
"""What an empty file costs the kernel; tmpfs does not count it in its size."""
SOCKET_BYTES = 208 * 1024
"""Default bound of what waits in one socket (net.core.wmem_default)."""
STACK_BYTES = 16 * 1024
"""Of a thread, in the kernel."""

Fields = Mapping[str, int]


class TreeMemory:
    """The processes of a sandbox, seen from the host through the sandbox's own /proc.

    Args:
        pid: its first process, as the host numbers it.
        folders: its folders in memory.

    Raises:
        FileNotFoundError, ProcessLookupError: it is over. PermissionError: the host does not let this be read.
    """

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
        """Bytes held now; exact only where that decides whether `limit` is passed.

        What processes share after a fork counts once for each in the quick sum. The exact one walks page tables.
        """
        shared = self._in_folders() + self._in_sockets()
        quick = shared + sum(_kernel(status) + _pages(status) for _, status in self._processes())
        if quick <= limit:
            return quick
        return shared + sum(_kernel(status) + self._proportional(pid, status) for pid, status in self._processes())

    def close(self) -> None:
        """Let go of the sandbox's folders, which live on while they are held open."""
        self._close()

    def _processes(self) -> Iterator[tuple[str, Fields]]:
        for name in os.listdir(self._proc):
            if name.isdigit():
                # It may end at any moment.
                with suppress(FileNotFoundError, ProcessLookupError):
                    yield name, self._fields(f"{name}/status")

    def _proportional(self, pid: str, status: Fields) -> int:
        try:
            rollup = self._fields(f"{pid}/smaps_rollup")
        except (FileNotFoundError, ProcessLookupError):
            return 0
        except PermissionError:
            return _pages(status)
        return 1024 * (rollup.get("Pss_Anon", rollup.get("Pss", 0)) + rollup.get("SwapPss", 0))

    def _in_folders(self) -> int:
        stats = [os.fstatvfs(folder) for folder in self._folders]
        return sum(s.f_frsize * (s.f_blocks - s.f_bfree) + INODE_BYTES * (s.f_files - s.f_ffree) for s in stats)

    def _in_sockets(self) -> int:
        try:
            used = self._fields("1/net/sockstat").get("sockets", 0)
        except (FileNotFoundError, ProcessLookupError):
            return 0
        return SOCKET_BYTES * used

    def _fields(self, path: str) -> Fields:
        """The last number of each `Name: ... number [kB]` line."""
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
