"""An executor under test: its profile, small jobs to give it, and what such a job says of itself."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any

from nemotron_steps.config.profiles import OpenProfile, Profile
from nemotron_steps.runs.executors.base import Executor, JobStatus, Launch, find_executor
from nemotron_steps.testing.suite import Unmet

SECRET = "kit-4f1c9e0b7a53-canary"

_JOB = """
import json, os, select, signal, sys, time
folder, kind, *words = sys.argv[1:]
path = lambda name: os.path.join(folder, name)
ended = lambda *_: (open(path("stopped"), "w").close(), sys.exit(0))
signal.signal(signal.SIGTERM, ended)
with open(path("begun"), "a") as file:
    file.write("once more\\n")
told = {"words": words, "cwd": os.getcwd(), "environment": dict(os.environ), "pid": os.getpid()}
if kind == "read":
    told["waits"] = not select.select([0], [], [], 0.5)[0]
print(f"kit out {os.getpid()}", flush=True)
print(f"kit err {os.getpid()}", file=sys.stderr, flush=True)
if kind == "print":
    for number in range(20):
        print("a line of a log\\n" * 4096, flush=True)
with open(path("told.part"), "w") as file:
    json.dump(told, file)
os.rename(path("told.part"), path("told.json"))
if kind == "fail":
    sys.exit(3)
if kind == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
until = time.monotonic() + 120
while kind == "wait" and not os.path.exists(path("go")) and time.monotonic() < until:
    time.sleep(0.02)
"""
OF_THE_JOB = ("told.json", "told.part", "begun", "stopped", "go")
"""Files of a run's folder that the job writes, or the kit for it."""


@dataclass(frozen=True)
class SmallLaunch(Launch):
    """A launch whose command is a small job of the kit's.

    `arguments`: what it does, and words that it repeats. `run` ends at once, `fail` with exit code 3, `kill` by
    SIGKILL, `wait` when a file `go` is in its folder; `print` prints a megabyte, `read` looks for input.
    """

    def command(self, *, in_container: bool = False) -> list[str]:
        """See Launch."""
        python = "python3" if in_container else sys.executable
        return [python, "-I", "-S", "-c", _JOB, str(self.folder), *self.arguments]


@dataclass
class ExecutorSubject:
    """What the checks of an executor ask.

    Args:
        name: registered name.
        folder: for run folders; where jobs run has to see it.
        keys: keys of its profile.
        seconds: the longest that a job may take to start or to end.
    """

    name: str
    folder: Path
    keys: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 60.0
    _numbers: Any = field(default_factory=count)

    @cached_property
    def executor(self) -> Executor:
        """The executor."""
        return find_executor(self.name)

    @cached_property
    def model(self) -> type[Profile]:
        """The model of its profiles."""
        return getattr(self.executor, "profile_model", OpenProfile)

    def profile(self, **keys: Any) -> Profile:
        """A profile of its."""
        return self.model.model_validate({"executor": self.name, **self.keys, **keys})

    def launch(
        self, *arguments: str, environment: Mapping[str, str] | None = None, suffix: str = "", **keys: Any
    ) -> SmallLaunch:
        """A launch, with a folder of its own whose name ends with `suffix`."""
        run_id = f"kit-{next(self._numbers)}"
        folder = self.folder / f"{run_id}{suffix}"
        folder.mkdir(parents=True)
        (self.folder / "a place").mkdir(exist_ok=True)
        return SmallLaunch(
            run_id, folder, arguments, self.profile(**keys), self.folder / "a place", dict(environment or {})
        )

    def submitted(self, launch: Launch) -> str:
        """The name of a job. Unmet if it cannot be submitted."""
        try:
            return self.executor.submit(launch)
        except Exception as error:
            words = shlex.join(launch.arguments)
            raise Unmet(f"submitting `{words}` raises {type(error).__name__}: {error}") from error

    def told(self, launch: Launch) -> dict[str, Any]:
        """What a job said of itself when it began."""
        file = launch.folder / "told.json"
        if not self.wait(file.is_file):
            raise Unmet(f"the job did not begin within {self.seconds:.0f} s", found=_console(launch))
        found: dict[str, Any] = json.loads(file.read_text())
        return found

    def ran(self, launch: Launch) -> dict[str, Any]:
        """Submit a job, wait until it is over; what it said of itself."""
        job = self.submitted(launch)
        told = self.told(launch)
        self.over(job)
        return told

    def wait(self, condition: Callable[[], bool]) -> bool:
        """Whether a condition came true in time."""
        until = time.monotonic() + self.seconds
        while not condition():
            if time.monotonic() > until:
                return False
            time.sleep(0.02)
        return True

    def over(self, job: str) -> JobStatus:
        """The state of a job when it is over."""
        if not self.wait(lambda: self.executor.status(job).state.over):
            raise Unmet(f"the job is not over after {self.seconds:.0f} s", found=self.executor.status(job))
        return self.executor.status(job)

    def end(self, job: str) -> None:
        """Stop a job and wait until it is over."""
        self.executor.cancel(job)
        self.over(job)

    def printed(self, job: str, launch: Launch) -> str:
        """What is in the files of a run's folder that the job did not write itself."""
        fetch = getattr(self.executor, "fetch", None)
        if fetch is not None:
            fetch(job, launch.folder)
        files = (path for path in sorted(launch.folder.rglob("*")) if path.is_file() and path.name not in OF_THE_JOB)
        return "\n".join(path.read_text("utf-8", "replace") for path in files)


def _console(launch: Launch) -> str | None:
    texts = [path.read_text("utf-8", "replace") for path in sorted(launch.folder.glob("*")) if path.is_file()]
    return "\n".join(texts)[-400:] or None


def bytes_of(path: Path) -> bytes:
    """What is in a file; nothing of one that is not there."""
    try:
        return path.read_bytes()
    except OSError:
        return b""
