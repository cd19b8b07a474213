"""What a step's function does to the machine while it runs: files it opens and makes, hosts it asks, what it leaves.

Python's audit events tell. They do not reach what a program that the step starts does; for that the working
directory and HOME of the process are empty folders, looked at afterwards.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CHANGES = {
    "os.mkdir": 1,
    "os.rename": 2,
    "os.remove": 1,
    "os.rmdir": 1,
    "os.symlink": 2,
    "os.link": 2,
    "os.truncate": 1,
    "os.chmod": 1,
    "os.chown": 1,
}
"""Audit event → how many of its first arguments are paths."""
_NOWHERE = ("/dev/", "/proc/")


@dataclass
class Seen:
    """What was seen.

    Attributes:
        written: paths written to or changed, outside of the folders allowed.
        writes_inside: files opened for writing below the work folder.
        hosts: addresses beyond this machine that were asked.
        changed: what of the process is otherwise than before: working directory, environment, signal handlers.
        threads, children: what the function left running.
        modules: name → file of the modules loaded from the step's own package.
        read: other files of the step's own package that were read.
    """

    written: list[str] = field(default_factory=list)
    writes_inside: int = 0
    hosts: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    threads: list[str] = field(default_factory=list)
    children: list[str] = field(default_factory=list)
    modules: dict[str, str] = field(default_factory=dict)
    read: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """JSON-serialisable form."""
        return asdict(self)


class Watch:
    """Looks on while its `watching()` is open; a process has at most one, for audit hooks stay for good.

    Args:
        allowed: folders the function may write to.
        inside: the work folder, whose files are counted.
        package: the step's own top-level package or module.
        at_write, with_signal: at the so manieth file opened for writing inside, this process gets that signal.
    """

    def __init__(
        self, allowed: tuple[str, ...], inside: str, package: str, at_write: int = 0, with_signal: int = signal.SIGKILL
    ) -> None:
        self.seen = Seen()
        self._allowed = tuple(os.path.realpath(folder) for folder in allowed)
        self._inside = os.path.realpath(inside)
        self._package = package
        self._folders: tuple[str, ...] = ()
        self._at_write = at_write
        self._signal = with_signal
        self._active = False
        sys.addaudithook(self._hook)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """While a step's function runs."""
        module = sys.modules.get(self._package)
        self._folders = tuple(os.path.realpath(path) for path in getattr(module, "__path__", ()))
        before = _process_state()
        threads = set(threading.enumerate())
        children = set(_children())
        self._active = True
        try:
            yield
        finally:
            self._active = False
            after = _process_state()
            self.seen.changed += [name for name in before if before[name] != after[name]]
            left = [thread for thread in threading.enumerate() if thread not in threads and thread.is_alive()]
            self.seen.threads += [thread.name for thread in left if not thread.daemon]
            self.seen.children += [_command(pid) for pid in _children() if pid not in children]
            self.seen.modules.update(self._own_modules())

    def _own_modules(self) -> dict[str, str]:
        return {
            name: str(module.__file__)
            for name, module in list(sys.modules.items())
            if name.partition(".")[0] == self._package and getattr(module, "__file__", None)
        }

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._active:
            return
        if event == "open":
            path, _, flags = arguments
            if isinstance(path, str | bytes | os.PathLike):
                self._opened(os.fsdecode(path), bool(isinstance(flags, int) and flags & _WRITING))
        elif event in _CHANGES:
            for path in arguments[: _CHANGES[event]]:
                if isinstance(path, str | bytes | os.PathLike):
                    self._changed(os.fsdecode(path))
        elif event == "socket.connect":
            address = arguments[1]
            if isinstance(address, tuple) and not str(address[0]).startswith(("127.", "::1", "localhost")):
                self.seen.hosts.append(f"{address[0]}:{address[1]}")

    def _opened(self, path: str, writing: bool) -> None:
        if writing:
            self._changed(path)
            if _below(os.path.realpath(path), (self._inside,)):
                self.seen.writes_inside += 1
                if self.seen.writes_inside == self._at_write:
                    signal.raise_signal(self._signal)
        elif not path.endswith((".py", ".pyc")) and _below(os.path.realpath(path), self._folders):
            self.seen.read.append(path)

    def _changed(self, path: str) -> None:
        real = os.path.realpath(path)
        if not real.startswith(_NOWHERE) and not _below(real, self._allowed) and real not in self.seen.written:
            self.seen.written.append(real)


def _below(path: str, folders: tuple[str, ...]) -> bool:
    return any(path == folder or path.startswith(folder + os.sep) for folder in folders)


def _process_state() -> dict[str, Any]:
    return {
        "the working directory": os.getcwd(),
        "the environment": dict(os.environ),
        "a signal's handler": {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)},
        "the umask": _umask(),
    }


def _umask() -> int:
    now = os.umask(0)
    os.umask(now)
    return now


def _children() -> list[int]:
    """Processes that this one started and that still run."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        try:
            found += [int(pid) for pid in (task / "children").read_text().split()]
        except OSError:  # a thread that just ended
            continue
    return [pid for pid in found if _command(pid)]


def _command(pid: int) -> str:
    """What a process runs; empty for one that is over and not waited for yet."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace").strip()
    except OSError:
        return ""
