"""Checks of an executor: small jobs are submitted, asked about and cancelled for real."""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from nemotron_steps.config.profiles import OpenProfile, Profile
from nemotron_steps.errors import StepsError
from nemotron_steps.runs.executors.base import Executor, JobState, JobStatus, Launch, find_executor
from nemotron_steps.testing.step_manifest import check_import
from nemotron_steps.testing.suite import NotApplicable, Suite, Unmet

SECRET = "kit-4f1c9e0b7a53-canary"

_JOB = """
import json, os, signal, sys, time
folder, kind, *words = sys.argv[1:]
ended = lambda *_: (open(os.path.join(folder, "stopped"), "w").close(), sys.exit(0))
signal.signal(signal.SIGTERM, ended)
told = {"words": words, "cwd": os.getcwd(), "environment": dict(os.environ), "pid": os.getpid()}
with open(os.path.join(folder, "told.part"), "w") as file:
    json.dump(told, file)
os.rename(os.path.join(folder, "told.part"), os.path.join(folder, "told.json"))
if kind == "fail":
    sys.exit(3)
if kind == "wait":
    time.sleep(120)
"""
_AWKWARD = (
    "two words",
    'a"b',
    "it's",
    "$HOME",
    "`id`",
    "a;b",
    "a\\b",
    "*",
    "",
    "{x}",
    "\u00e9\u6f22",
    "line\nbreak",
    "-n",
)
_NO_JOBS = ("", "0", "999999999", "kit no job", "../../etc", "999999999@1", "a; touch kit-was-here", "\u0663@1", "-1")


@dataclass(frozen=True)
class SmallLaunch(Launch):
    """A launch whose command is a small job of the kit's. `arguments`: what it is to be (`wait`, `fail`), and words."""

    def command(self, *, in_container: bool = False) -> list[str]:
        """See Launch."""
        python = "python3" if in_container else sys.executable
        return [python, "-c", _JOB, str(self.folder), *self.arguments]


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

    def launch(self, *arguments: str, environment: Mapping[str, str] | None = None, **keys: Any) -> SmallLaunch:
        """A launch, with a folder of its own."""
        run_id = f"kit-{next(self._numbers)}"
        folder = self.folder / run_id
        folder.mkdir()
        (self.folder / "a place").mkdir(exist_ok=True)
        return SmallLaunch(
            run_id, folder, arguments, self.profile(**keys), self.folder / "a place", dict(environment or {})
        )

    def told(self, launch: Launch) -> dict[str, Any]:
        """What a job said of itself when it began."""
        file = launch.folder / "told.json"
        if not self.wait(file.is_file):
            raise Unmet(f"the job did not begin within {self.seconds:.0f} s", found=_console(launch))
        found: dict[str, Any] = json.loads(file.read_text())
        return found

    def wait(self, condition: Callable[[], bool]) -> bool:
        """Whether a condition came true in time."""
        until = time.monotonic() + self.seconds
        while not condition():
            if time.monotonic() > until:
                return False
            time.sleep(0.05)
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


SUITE: Suite[ExecutorSubject] = Suite()


@SUITE.check()
def is_registered(subject: ExecutorSubject) -> None:
    """An entry point of its name brings something that has submit, status and cancel."""
    try:
        assert subject.executor
    except StepsError as error:
        raise Unmet(error.what, where=error.where, hint="; ".join(error.hints) or None) from error


@SUITE.check("is_registered")
def importing_it_is_light(subject: ExecutorSubject) -> None:
    """Its module imports no framework, prints nothing and starts nothing."""
    check_import([type(subject.executor).__module__])


@SUITE.check("is_registered")
def its_profile_is_strict(subject: ExecutorSubject) -> None:
    """It names the keys of its profiles, refuses others, and accepts those that the kit was given."""
    try:
        subject.profile()
    except ValidationError as error:
        raise Unmet(f"the keys that the kit was given are refused: {error}") from error
    try:
        subject.profile(no_such_key=1)
    except ValidationError:
        return
    raise Unmet(
        "a key that means nothing is accepted in a profile",
        where=f"{subject.model.__module__}:{subject.model.__qualname__}",
        hint="profile_model = a subclass of nemotron_steps.config.profiles.Profile",
    )


@SUITE.check("its_profile_is_strict")
def a_job_runs(subject: ExecutorSubject) -> None:
    """A job begins and is over, and never runs again."""
    launch = subject.launch("run")
    job = _submitted(subject, launch)
    subject.told(launch)
    state = subject.over(job).state
    if state not in (JobState.DONE, JobState.LOST):
        raise Unmet("a job that ended well is told as something else", found=state)


@SUITE.check("a_job_runs")
def names_are_plain(subject: ExecutorSubject) -> None:
    """A job's name is one line of text, another one for each job."""
    launches = [subject.launch("run") for _ in range(2)]
    jobs = [_submitted(subject, launch) for launch in launches]
    for job in jobs:
        if not isinstance(job, str) or not job.strip() or not job.isprintable():
            raise Unmet("a job's name is no line of text", found=repr(job))
    for job in jobs:
        subject.over(job)
    if jobs[0] == jobs[1]:
        raise Unmet("two jobs have one name", found=jobs[0])


@SUITE.check("a_job_runs")
def a_running_job_is_known(subject: ExecutorSubject) -> None:
    """While it works it is PENDING or RUNNING, and so says another object of the executor's."""
    launch = subject.launch("wait")
    job = _submitted(subject, launch)
    subject.told(launch)
    try:
        for executor in (subject.executor, find_executor(subject.name)):
            state = executor.status(job).state
            if state.over:
                raise Unmet("a job that works is told as over", found=state, hint="the name alone has to find the job")
    finally:
        subject.end(job)


@SUITE.check("a_job_runs")
def a_failure_is_over(subject: ExecutorSubject) -> None:
    """A job that ends with an exit code is FAILED, or LOST where nobody knows; never DONE."""
    launch = subject.launch("fail")
    job = _submitted(subject, launch)
    state = subject.over(job).state
    if state not in (JobState.FAILED, JobState.LOST):
        raise Unmet("a job that ended with exit code 3 is told as something else", found=state)


@SUITE.check("a_running_job_is_known")
def cancel_stops_a_job(subject: ExecutorSubject) -> None:
    """A job that is cancelled gets SIGTERM, and nothing of it is left."""
    launch = subject.launch("wait")
    job = _submitted(subject, launch)
    pid = subject.told(launch)["pid"]
    subject.executor.cancel(job)
    subject.over(job)
    if not subject.wait((launch.folder / "stopped").is_file):
        raise Unmet("a cancelled job is not told with SIGTERM", hint="it saves what it has on SIGTERM")
    if not subject.wait(lambda: not _runs(pid, launch)):
        raise Unmet("a cancelled job goes on")


@SUITE.check("a_job_runs")
def cancel_of_what_is_over_does_nothing(subject: ExecutorSubject) -> None:
    """A job that is over, or that never was, can be cancelled: nothing happens."""
    launch = subject.launch("run")
    job = _submitted(subject, launch)
    subject.over(job)
    for name in (job, *_NO_JOBS):
        try:
            subject.executor.cancel(name)
        except Exception as error:
            raise Unmet(f"cancelling {name!r} raises {type(error).__name__}: {error}") from error


@SUITE.check("is_registered")
def an_unknown_job_is_lost(subject: ExecutorSubject) -> None:
    """A name of no job is LOST, whatever is in it."""
    for name in _NO_JOBS:
        try:
            state = subject.executor.status(name).state
        except Exception as error:
            raise Unmet(f"asking about {name!r} raises {type(error).__name__}: {error}") from error
        if state is not JobState.LOST:
            raise Unmet(f"{name!r} is no job, and told as {state}", hint="JobStatus(JobState.LOST)")
    if Path("kit-was-here").exists():
        Path("kit-was-here").unlink()
        raise Unmet("a job's name is run by a shell")


@SUITE.check("a_job_runs")
def words_arrive_as_they_are(subject: ExecutorSubject) -> None:
    """Spaces, quotes, `$`, line ends: no shell reads the command."""
    launch = subject.launch("run", *_AWKWARD)
    job = _submitted(subject, launch)
    found = subject.told(launch)["words"]
    subject.over(job)
    if found != list(_AWKWARD):
        wrong = [(given, got) for given, got in zip(_AWKWARD, [*found, *[None] * 20], strict=False) if given != got]
        raise Unmet("a word of the command arrives as another", found=wrong[:2], hint="shlex.join, or a list")


@SUITE.check("a_job_runs")
def variables_arrive(subject: ExecutorSubject) -> None:
    """The profile's env_vars and the launch's variables are set, as they are."""
    awkward = "a 'b' \"c\" $HOME;\\ \u00e9"
    launch = subject.launch("run", environment={"KIT_LAUNCH": awkward}, env_vars={"KIT_PROFILE": awkward})
    job = _submitted(subject, launch)
    found = subject.told(launch)["environment"]
    subject.over(job)
    for name in ("KIT_LAUNCH", "KIT_PROFILE"):
        if found.get(name) != awkward:
            raise Unmet(f"the variable {name} arrives as something else", found=repr(found.get(name)))


@SUITE.check("a_job_runs")
def it_runs_where_it_was_asked(subject: ExecutorSubject) -> None:
    """The working directory is the launch's."""
    launch = subject.launch("run")
    job = _submitted(subject, launch)
    found = subject.told(launch)["cwd"]
    subject.over(job)
    if os.path.realpath(found) != os.path.realpath(launch.working_dir):
        raise Unmet("the job works in another directory", found=found)


@SUITE.check("a_job_runs")
def setup_lines_come_first(subject: ExecutorSubject) -> None:
    """The profile's setup_lines are run by a shell before the job."""
    launch = subject.launch("run", setup_lines=["export KIT_SETUP=done", "true"])
    job = _submitted(subject, launch)
    found = subject.told(launch)["environment"].get("KIT_SETUP")
    subject.over(job)
    if found != "done":
        raise Unmet("the profile's setup_lines are not run before the job")


@SUITE.check("variables_arrive")
def secrets_are_not_written_down(subject: ExecutorSubject) -> None:
    """A secret variable reaches the job, or is refused; it is in no file of the run and in no command line."""
    launch = subject.launch("wait", env_vars={"KIT_API_KEY": SECRET})
    try:
        job = subject.executor.submit(launch)
    except StepsError:
        return
    try:
        told = launch.folder / "told.json"
        arrived = subject.told(launch)["environment"].get("KIT_API_KEY")
        told.unlink()  # the job's own word, not the executor's
        if arrived != SECRET:
            raise Unmet("a secret variable neither arrives nor is refused", found=arrived)
        for path in launch.folder.rglob("*"):
            if path.is_file() and SECRET.encode() in path.read_bytes():
                raise Unmet("a secret variable is written down", where=str(path))
        if SECRET in job:
            raise Unmet("a secret variable is in the job's name")
        for line in Path("/proc").glob("[0-9]*/cmdline"):
            if SECRET.encode() in _bytes(line):
                raise Unmet("a secret variable is in a command line, which every user of the machine sees")
    finally:
        subject.end(job)


@SUITE.check("a_job_runs")
def what_cannot_start_is_told(subject: ExecutorSubject) -> None:
    """A working directory that is not there is an error with a code, or a job that is over."""
    launch = subject.launch("run")
    launch = SmallLaunch(launch.run_id, launch.folder, launch.arguments, launch.profile, subject.folder / "absent")
    try:
        job = subject.executor.submit(launch)
    except StepsError:
        return
    except Exception as error:
        raise Unmet(
            f"submitting raises {type(error).__name__}: {error}",
            hint="raise RequestError or UnsupportedError, with a hint to paste",
        ) from error
    subject.over(job)


@SUITE.check("a_running_job_is_known")
def jobs_do_not_mix(subject: ExecutorSubject) -> None:
    """Of two jobs at once, cancelling one leaves the other."""
    launches = [subject.launch("wait") for _ in range(2)]
    jobs = [_submitted(subject, launch) for launch in launches]
    try:
        for launch in launches:
            subject.told(launch)
        subject.end(jobs[0])
        if subject.executor.status(jobs[1]).state.over or (launches[1].folder / "stopped").exists():
            raise Unmet("cancelling a job ends another")
    finally:
        subject.end(jobs[1])


@SUITE.check("is_registered")
def keys_are_described(subject: ExecutorSubject) -> None:
    """Each key of its profiles says what it does."""
    import inspect

    own = set(subject.model.model_fields) - set(Profile.model_fields)
    if not own:
        raise NotApplicable("its profiles have no keys of their own")
    source = inspect.getsource(subject.model)
    for name in sorted(own):
        described = subject.model.model_fields[name].description
        _, found, below = source.partition(f"\n    {name}:")
        if not described and (not found or '"""' not in below.partition("\n    ")[2].lstrip()[:3]):
            raise Unmet(f"the key '{name}' is not described", where=subject.model.__qualname__)


def _submitted(subject: ExecutorSubject, launch: Launch) -> str:
    try:
        return subject.executor.submit(launch)
    except Exception as error:
        raise Unmet(f"submitting `{shlex.join(launch.arguments)}` raises {type(error).__name__}: {error}") from error


def _console(launch: Launch) -> str | None:
    texts = [path.read_text("utf-8", "replace") for path in sorted(launch.folder.glob("*")) if path.is_file()]
    return "\n".join(texts)[-400:] or None


def _runs(pid: int, launch: Launch) -> bool:
    """Whether a job's process is still there (another machine's is not seen)."""
    return str(launch.folder).encode() in _bytes(Path(f"/proc/{pid}/cmdline"))


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
