"""What a step's function does to the machine while it runs, by Python's audit events. `python -m …watching REQUEST
RESULT` is a process for commands of `steps` (JSON: `commands`, `step`, the fields of Watch, `at_return`: killed
when the function has returned) in which a step's function is watched."""

import io
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from nemotron_steps.sandbox.base import CANARY

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_HELPER = "from multiprocessing.resource_tracker import main"
"""A program that Python starts once for a process and that ends with it."""
_NOWHERE = ("/dev/", "/proc/")


@dataclass
class Seen:
    """What was seen: what is left running, and the files of its own package that it `used`."""

    written: list[str] = field(default_factory=list)
    """Files opened for writing, outside of the folders allowed."""
    writes_inside: int = 0
    hosts: list[str] = field(default_factory=list)
    threads: list[str] = field(default_factory=list)
    children: list[str] = field(default_factory=list)
    used: list[str] = field(default_factory=list)


class Watch:
    """Looks on while `watching()` is open; at the so manieth file (`at_write`) in `inside` it sends the signal."""

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
        threads = set(threading.enumerate())
        children = set(_children())
        self._active = True
        try:
            yield
        finally:
            self._active = False
            left = [thread for thread in threading.enumerate() if thread not in threads and thread.is_alive()]
            self.seen.threads += [thread.name for thread in left if not thread.daemon]
            self.seen.children += [command for pid, command in _children().items() if pid not in children]
            for name, module in list(sys.modules.items()):
                if name.partition(".")[0] == self._package and getattr(module, "__file__", None):
                    self.seen.used.append(str(module.__file__))

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._active:
            return
        if event == "open" and isinstance(arguments[0], str | bytes | os.PathLike):
            path, flags = os.fsdecode(arguments[0]), arguments[2]
            self._opened(path, os.path.realpath(path), isinstance(flags, int) and bool(flags & _WRITING))
        elif event == "socket.connect":
            address = arguments[1]
            if isinstance(address, tuple) and not str(address[0]).startswith(("127.", "::1", "localhost")):
                self.seen.hosts.append(f"{address[0]}:{address[1]}")

    def _opened(self, path: str, real: str, writing: bool) -> None:
        if not writing:
            if not path.endswith((".py", ".pyc")) and _below(real, self._folders):
                self.seen.used.append(path)
            return
        if _below(real, (self._inside,)):
            self.seen.writes_inside += 1
            if self.seen.writes_inside == self._at_write:
                signal.raise_signal(self._signal)
        # What a sandbox lays out to see that it is hidden is not its user's doing.
        canary = os.path.basename(real).startswith(CANARY)
        if not canary and not real.startswith(_NOWHERE) and not _below(real, self._allowed):
            self.seen.written.append(real)


def _below(path: str, folders: tuple[str, ...]) -> bool:
    return any(path == folder or path.startswith(folder + os.sep) for folder in folders)


def _children() -> dict[int, str]:
    """Processes that this one started and that still run, by what they run; without Python's own helpers."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        try:
            found += [int(pid) for pid in (task / "children").read_text().split()]
        except OSError:  # a thread that just ended
            continue
    commands = {pid: _command(pid) for pid in found}
    return {pid: command for pid, command in commands.items() if command and _HELPER not in command}


def _command(pid: int) -> str:
    try:
        name, _, fields = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").partition("(")[2].rpartition(")")
        words = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return ""
    if fields.split()[0] in ("Z", "X"):
        return ""
    # A program that is just being loaded has a name, and no words yet.
    return words.replace(b"\0", b" ").decode("utf-8", "replace").strip() or name


def main(request_path: str, result_path: str) -> None:
    """Run the commands of a request, one after the other, and write the result."""
    from nemotron_steps.cli.main import steps
    from nemotron_steps.runs import execute, step_workdir

    request = json.loads(Path(request_path).read_text())
    watch = Watch(
        tuple(request["allowed"]),
        request["inside"],
        request["package"],
        request.get("at_write", 0),
        request.get("signal", signal.SIGKILL),
    )
    find = step_workdir.imported

    def watched(reference: str, planned: Any) -> Any:
        function = find(reference, planned)
        if planned.step_id != request["step"]:
            return function

        def run(context: Any) -> None:
            with watch.watching():
                function(context)
            if request.get("at_return"):
                os.kill(os.getpid(), signal.SIGKILL)

        return run

    vars(execute)["imported"] = watched  # wherever the runner takes the function from
    done: list[dict[str, Any]] = []
    for words in request["commands"]:
        out, err = io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(err):
            code = steps(words)
        done.append({"code": code, "out": out.getvalue(), "err": err.getvalue()})
        # After each, so that what ended the process is told from what went before it.
        Path(result_path).write_text(json.dumps({"commands": done, "seen": asdict(watch.seen)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
