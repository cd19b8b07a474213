"""An executor under test, small jobs to give it, and checks of what becomes of them."""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from nemotron_steps.config.profiles import Profile
from nemotron_steps.errors import StepsError
from nemotron_steps.runs.executors.base import Executor, JobState, Launch, find_executor, profile_model
from nemotron_steps.testing.step_subject import CANARY
from nemotron_steps.testing.suite import Suite, Unmet, told

AWKWARD = "a 'b' \"c\" $HOME;\\ \u00e9"
WORDS = ("two words", 'a"b', "it's", "$HOME", "`id`", "a;b", "a\\b", "*", "", "{x}", "\u00e9\u6f22", "a\nbreak", "-n")

_JOB = """
import json, os, signal, sys, time
folder, kind, *words = sys.argv[1:]
path = lambda name: os.path.join(folder, name)
ended = lambda *_: (open(path("stopped"), "w").close(), sys.exit(0))
signal.signal(signal.SIGTERM, ended)
with open(path("begun"), "a") as file:
    file.write("once more\\n")
told = {"words": words, "cwd": os.getcwd(), "environment": dict(os.environ), "pid": os.getpid()}
print(f"kit out {os.getpid()}", flush=True)
print(f"kit err {os.getpid()}", file=sys.stderr, flush=True)
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
_OF_THE_JOB = ("told.json", "told.part", "begun", "stopped", "go")
"""Files of a run's folder that the job writes, or the kit for it."""


@dataclass(frozen=True)
class SmallLaunch(Launch):
    """A launch of a small job of the kit's; `wait` ends when a file `go` is in its folder."""

    def command(self, *, in_container: bool = False) -> list[str]:
        """See Launch."""
        python = "python3" if in_container else sys.executable
        return [python, "-I", "-S", "-c", _JOB, str(self.folder), *self.arguments]


@dataclass
class ExecutorSubject:
    """What the checks of an executor ask. `folder` is for run folders; where jobs run has to see it."""

    name: str
    folder: Path
    keys: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 60.0
    _numbers: Any = field(default_factory=count)

    @cached_property
    def executor(self) -> Executor:
        """The executor."""
        return find_executor(self.name)

    def profile(self, **keys: Any) -> Profile:
        """A profile with the keys that the kit was given, and these."""
        return profile_model(self.name).model_validate({"executor": self.name, **self.keys, **keys})

    def launch(self, *arguments: str, environment: Mapping[str, str] | None = None, **keys: Any) -> SmallLaunch:
        """A launch, with a folder of its own."""
        run_id = f"kit-{next(self._numbers)}"
        folder, place = self.folder / run_id, self.folder / "a place"
        folder.mkdir(parents=True)
        place.mkdir(exist_ok=True)
        return SmallLaunch(run_id, folder, arguments, self.profile(**keys), place, dict(environment or {}))

    def submitted(self, launch: Launch) -> str:
        """The name of a job. Unmet if it has none."""
        job = self.executor.submit(launch)
        if not isinstance(job, str) or not job.strip() or not job.isprintable():
            raise Unmet("a job's name is not a line of text", found=repr(job))
        return job

    def told(self, launch: Launch) -> dict[str, Any]:
        """What a job said of itself when it began."""
        file = launch.folder / "told.json"
        if not self.wait(file.is_file):
            texts = [path.read_text("utf-8", "replace") for path in sorted(launch.folder.glob("*")) if path.is_file()]
            raise Unmet(f"the job did not begin within {self.seconds:.0f} s", found="\n".join(texts)[-400:] or None)
        found: dict[str, Any] = json.loads(file.read_text())
        return found

    def wait(self, condition: Callable[[], bool]) -> bool:
        """Whether a condition came true in time."""
        until = time.monotonic() + self.seconds
        while not condition():
            if time.monotonic() > until:
                return False
            time.sleep(0.02)
        return True

    def over(self, job: str) -> JobState:
        """The state of a job when it is over."""
        if not self.wait(lambda: self.executor.status(job).state.over):
            raise Unmet(f"the job is not over after {self.seconds:.0f} s", found=self.executor.status(job))
        return self.executor.status(job).state

    @contextmanager
    def working(self, launch: Launch) -> Iterator[str]:
        """A job that works meanwhile."""
        job = self.submitted(launch)
        try:
            self.told(launch)
            yield job
        finally:
            (launch.folder / "go").touch()
            self.over(job)

    def files_with(self, text: str, launch: Launch) -> list[Path]:
        """The files of a run's folder that hold a text, without those that the job writes itself."""
        files = [path for path in launch.folder.rglob("*") if path.name not in _OF_THE_JOB]
        return [path for path in files if text.encode() in _bytes_of(path)]


PROFILE_SUITE: Suite[ExecutorSubject] = Suite()


@PROFILE_SUITE.check()
def is_registered(subject: ExecutorSubject) -> None:
    """An entry point of its name brings something that has submit, status and cancel."""
    try:
        assert subject.executor
    except StepsError as error:
        raise told(error) from error


@PROFILE_SUITE.check("is_registered")
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
    hint = "profile_model = a subclass of nemotron_steps.config.profiles.Profile"
    raise Unmet("a key that means nothing is accepted in a profile", hint=hint)


SUITE: Suite[ExecutorSubject] = Suite(PROFILE_SUITE)


@SUITE.check("is_registered")
def a_job_runs(subject: ExecutorSubject) -> None:
    """A job has a name at once, whether somebody waits for the run or not; it begins, and is over: DONE, or LOST."""
    for attached in (False, True):
        launch = replace(subject.launch("wait"), attached=attached)
        with ThreadPoolExecutor(1) as pool:
            submitted = pool.submit(subject.submitted, launch)
            in_time = subject.wait(submitted.done)
            (launch.folder / "go").touch()
        if not in_time:
            raise Unmet(f"submit waits for the job's end (attached={attached})", hint="return its name at once")
        subject.told(launch)
        state = subject.over(submitted.result())
        if state not in (JobState.DONE, JobState.LOST):
            raise Unmet("a job that ended well is told as something else", found=state)


@SUITE.check("a_job_runs")
def it_gets_what_it_was_given(subject: ExecutorSubject) -> None:
    """Words as they are, the profile's variables and the launch's (which win), setup_lines, the working directory."""
    variables = {"KIT_LAUNCH": AWKWARD, "KIT_BOTH": "launch"}
    keys = {"env_vars": {"KIT_PROFILE": AWKWARD, "KIT_BOTH": "profile"}, "setup_lines": ["export KIT_SETUP=done"]}
    launch = subject.launch("run", *WORDS, environment=variables, **keys)
    job = subject.submitted(launch)
    found = subject.told(launch)
    subject.over(job)
    environment = {**variables, "KIT_PROFILE": AWKWARD, "KIT_SETUP": "done"}
    pairs: dict[str, tuple[Any, Any]] = {
        name: (found["environment"].get(name), value) for name, value in environment.items()
    }
    pairs["the words of the command"] = (found["words"], list(WORDS))
    pairs["the working directory"] = (os.path.realpath(found["cwd"]), os.path.realpath(launch.working_dir))
    for what, (got, given) in pairs.items():
        if got != given:
            hint = "shlex.join, or a list, for the words; launch.variables"
            raise Unmet(f"{what} not as given: {given!r}", found=repr(got), hint=hint)


@SUITE.check("a_job_runs")
def what_it_prints_is_kept(subject: ExecutorSubject) -> None:
    """Stdout and stderr are in the run's folder, and so are those of the run's next job (`--resume`)."""
    launch, jobs, pids = subject.launch("run"), [], []
    for _ in range(2):
        (launch.folder / "told.json").unlink(missing_ok=True)
        jobs.append(subject.submitted(launch))
        pids.append(subject.told(launch)["pid"])
        subject.over(jobs[-1])
    if jobs[0] == jobs[1]:
        raise Unmet("a run's second job has the name of its first", found=jobs[0], hint="number each submission")
    fetch = getattr(subject.executor, "fetch", lambda job, folder: None)
    for text in (f"kit {name} {pid}" for pid in pids for name in ("out", "err")):
        # Each is called before the next text's turn.
        if not subject.wait(lambda: bool(fetch(jobs[1], launch.folder) or subject.files_with(text, launch))):  # noqa: B023
            hint = "append to launch.folder / 'console.txt'"
            raise Unmet(f"'{text}', printed by one of a run's jobs, is not in the run's folder", hint=hint)


@SUITE.check("it_gets_what_it_was_given")
def secrets_are_not_written_down(subject: ExecutorSubject) -> None:
    """A secret variable reaches the job, or is refused; it is in no file, no command line, no name and no error."""
    launch = subject.launch("wait", environment={"KIT_TOKEN": CANARY}, env_vars={"KIT_API_KEY": CANARY})
    try:
        with subject.working(launch) as job:
            environment = subject.told(launch)["environment"]
            lost = [name for name in ("KIT_API_KEY", "KIT_TOKEN") if environment.get(name) != CANARY]
            if lost:
                raise Unmet("a secret variable neither arrives nor is refused", found=", ".join(lost))
            for path in subject.files_with(CANARY, launch):
                raise Unmet("a secret variable is written down", where=str(path))
            if CANARY in job:
                raise Unmet("a secret variable is in the job's name")
            if any(CANARY.encode() in _bytes_of(line) for line in Path("/proc").glob("[0-9]*/cmdline")):
                raise Unmet("a secret variable is in a command line, which every user of the machine sees")
    except StepsError as error:
        if CANARY in json.dumps(error.to_dict(), default=str):
            raise Unmet("the error of a refused submission shows a secret variable", found=error.code) from None


@SUITE.check("a_job_runs")
def a_failure_is_not_done(subject: ExecutorSubject) -> None:
    """A job that ends with exit code 3 or by SIGKILL is FAILED (or OUT_OF_MEMORY, LOST), and is not tried again."""
    for kind, state in (("fail", JobState.FAILED), ("kill", JobState.OUT_OF_MEMORY)):
        launch = subject.launch(kind)
        found = subject.over(subject.submitted(launch))
        if found not in (JobState.FAILED, state, JobState.LOST):
            raise Unmet(f"a job that failed ({kind}) is told as something else", found=found)
        begun = (launch.folder / "begun").read_text().count("\n")
        if begun != 1:
            raise Unmet("a job that failed is started again", found=f"begun {begun} times", hint="no retries")


@SUITE.check("a_job_runs")
def cancel_stops_a_job(subject: ExecutorSubject) -> None:
    """A cancelled job gets SIGTERM, itself and not only the shell of its setup_lines, and nothing of it is left."""
    launch = subject.launch("wait", setup_lines=["true"])
    with subject.working(launch) as job:
        pid, stopped = subject.told(launch)["pid"], launch.folder / "stopped"
        subject.executor.cancel(job)
        if not subject.wait(lambda: stopped.is_file() or subject.executor.status(job).state.over):
            raise Unmet("a cancelled job goes on")
        subject.over(job)
        if not stopped.is_file():
            raise Unmet("a cancelled job is not told with SIGTERM", hint="it saves what it has on SIGTERM")
    mark = str(launch.folder).encode()  # another machine's process is not seen
    if not subject.wait(lambda: mark not in _bytes_of(Path(f"/proc/{pid}/cmdline"))):
        raise Unmet("a cancelled job leaves a process")


def _bytes_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
