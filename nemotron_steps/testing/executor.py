"""An executor under test, small jobs to give it, and checks of what becomes of them."""

from __future__ import annotations

import inspect
import json
import os
import shlex
import subprocess
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

from nemotron_steps.config.profiles import OpenProfile, Profile
from nemotron_steps.errors import StepsError
from nemotron_steps.runs.executors.base import Executor, JobState, JobStatus, Launch, find_executor
from nemotron_steps.testing.step_manifest import check_import
from nemotron_steps.testing.suite import NotApplicable, Suite, Unmet, told
from nemotron_steps.testing.watching import stdout_seen

SECRET = "kit-4f1c9e0b7a53-canary"
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
_NO_JOBS = ("", "0", "999999999", "kit no job", "../../etc", "999999999@1", "a; touch kit-was-here", "\u0663@1", "-1")
_NOT_THERE = ("999999999", "999999999@999999999", "kit no job", "a; touch kit-was-here")
"""Names of no job that are cancelled: no number among them is a process, a group ("-1" and "0" are) or can become one,
so that a first draft with `os.kill(int(job), SIGTERM)` ends nothing of its author's."""
_SUBMITTER = """
import json, os, signal, sys
from pathlib import Path
from nemotron_steps.testing.executor import ExecutorSubject
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored under nohup, and then by what it starts
name, folder, keys, seconds = json.loads(sys.argv[1])
subject = ExecutorSubject(name, Path(folder), keys, seconds)
launch = subject.launch("wait")
job = subject.executor.submit(launch)
Path(folder, "submitted").write_text(json.dumps([str(launch.folder), job]))
os.killpg(0, signal.SIGHUP)
"""
"""A process that submits a job and ends as a terminal that is closed ends what runs in it."""


@dataclass(frozen=True)
class SmallLaunch(Launch):
    """A launch whose command is a small job of the kit's.

    `arguments`: what it does, and words that it repeats. `run` ends at once, `fail` with exit code 3, `kill` by
    SIGKILL, `wait` when a file `go` is in its folder; `print` prints a megabyte.
    """

    def command(self, *, in_container: bool = False) -> list[str]:
        """See Launch."""
        python = "python3" if in_container else sys.executable
        return [python, "-I", "-S", "-c", _JOB, str(self.folder), *self.arguments]


@dataclass
class ExecutorSubject:
    """What the checks of an executor ask. Its arguments are those of `executor_conformance`.

    Args:
        folder: for run folders; where jobs run has to see it.
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
        folder.mkdir(parents=True)
        (self.folder / "a place").mkdir(exist_ok=True)
        return SmallLaunch(
            run_id, folder, arguments, self.profile(**keys), self.folder / "a place", dict(environment or {})
        )

    def submitted(self, launch: Launch) -> str:
        """The name of a job. Unmet if it cannot be submitted, or has no name."""
        try:
            job = self.executor.submit(launch)
        except Exception as error:
            words = shlex.join(launch.arguments)
            raise Unmet(f"submitting `{words}` raises {type(error).__name__}: {error}") from error
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

    @cached_property
    def first(self) -> tuple[SmallLaunch, dict[str, Any]]:
        """A job that ran with words, variables and setup_lines, and what it said of itself."""
        launch = self.launch(
            "run",
            *WORDS,
            environment={"KIT_LAUNCH": AWKWARD, "KIT_BOTH": "launch"},
            env_vars={"KIT_PROFILE": AWKWARD, "KIT_BOTH": "profile"},
            setup_lines=["export KIT_SETUP=done", "true"],
        )
        job = self.submitted(launch)
        told = self.told(launch)
        self.over(job)
        return launch, told

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

    def kept(self, text: str, job: str, launch: Launch) -> bool:
        """Whether a text comes to be in a file of a run's folder that the job did not write itself."""
        fetch = getattr(self.executor, "fetch", None)

        def found() -> bool:
            if fetch is not None:
                fetch(job, launch.folder)
            files = (path for path in launch.folder.rglob("*") if path.is_file() and path.name not in OF_THE_JOB)
            return any(text.encode() in path.read_bytes() for path in files)

        return self.wait(found)


PROFILE_SUITE: Suite[ExecutorSubject] = Suite()


@PROFILE_SUITE.check()
def is_registered(subject: ExecutorSubject) -> None:
    """An entry point of its name brings something that has submit, status and cancel."""
    try:
        assert subject.executor
    except StepsError as error:
        raise told(error) from error


@PROFILE_SUITE.check("is_registered")
def importing_it_is_light(subject: ExecutorSubject) -> None:
    """Its module imports no framework, prints nothing and starts nothing."""
    check_import([type(subject.executor).__module__])


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
    raise Unmet(
        "a key that means nothing is accepted in a profile",
        where=f"{subject.model.__module__}:{subject.model.__qualname__}",
        hint="profile_model = a subclass of nemotron_steps.config.profiles.Profile",
    )


@PROFILE_SUITE.check("is_registered")
def keys_are_described(subject: ExecutorSubject) -> None:
    """Each key of its profiles says what it does."""
    own = sorted(set(subject.model.model_fields) - set(Profile.model_fields))
    if not own:
        raise NotApplicable("its profiles have no keys of their own")
    source = inspect.getsource(subject.model)
    for name in own:
        described = subject.model.model_fields[name].description
        _, found, below = source.partition(f"\n    {name}:")
        if not described and (not found or '"""' not in below.partition("\n    ")[2].lstrip()[:3]):
            where = f"{subject.model.__module__}:{subject.model.__qualname__}"
            raise Unmet(f"the key '{name}' is not described", where=where)


SUITE: Suite[ExecutorSubject] = Suite(PROFILE_SUITE)


@SUITE.check("is_registered")
def a_job_runs(subject: ExecutorSubject) -> None:
    """A job has a name, begins, and is over: DONE, or LOST where nobody knows."""
    launch = subject.launch("run")
    job = subject.submitted(launch)
    subject.told(launch)
    state = subject.over(job).state
    if state not in (JobState.DONE, JobState.LOST):
        raise Unmet("a job that ended well is told as something else", found=state)


@SUITE.check("a_job_runs")
def submitting_does_not_wait(subject: ExecutorSubject) -> None:
    """`submit` returns while the job works, whether somebody waits for the run (`-r`) or not (`-b`)."""
    for attached in (False, True):
        launch = replace(subject.launch("wait"), attached=attached)
        with ThreadPoolExecutor(1) as pool:
            submitted = pool.submit(subject.submitted, launch)
            in_time = subject.wait(submitted.done)
            (launch.folder / "go").touch()
        if not in_time:
            raise Unmet(
                f"submit waits for the job's end (attached={attached})", hint="start it, and return its name at once"
            )
        subject.over(submitted.result())


@SUITE.check("submitting_does_not_wait")
def it_prints_nothing(subject: ExecutorSubject) -> None:
    """Nothing goes to stdout, which belongs to `--json`; nor does what its commands print."""
    launch = subject.launch("wait")
    with stdout_seen() as printed, subject.working(launch) as job:
        subject.executor.status(job)
        subject.executor.cancel(job)
    if any(printed):
        raise Unmet("it prints to stdout", found=repr(printed[0][:200]), hint="logging, or capture_output=True")


@SUITE.check("a_job_runs")
def words_arrive_as_they_are(subject: ExecutorSubject) -> None:
    """Spaces, quotes, `$`, line ends: no shell reads the command."""
    found = subject.first[1]["words"]
    if found != list(WORDS):
        wrong = [(given, got) for given, got in zip(WORDS, [*found, *[None] * 20], strict=False) if given != got]
        raise Unmet("a word of the command arrives as another", found=wrong[:2], hint="shlex.join, or a list")


@SUITE.check("a_job_runs")
def variables_arrive(subject: ExecutorSubject) -> None:
    """The profile's env_vars and the launch's variables are set, as they are; of one in both, the launch's."""
    found = subject.first[1]["environment"]
    for name, given in (("KIT_LAUNCH", AWKWARD), ("KIT_PROFILE", AWKWARD), ("KIT_BOTH", "launch")):
        if found.get(name) != given:
            raise Unmet(
                f"the variable {name} arrives as something else", found=repr(found.get(name)), hint="launch.variables"
            )


@SUITE.check("a_job_runs")
def setup_lines_come_first(subject: ExecutorSubject) -> None:
    """The profile's setup_lines are run by a shell before the job."""
    if subject.first[1]["environment"].get("KIT_SETUP") != "done":
        raise Unmet("the profile's setup_lines are not run before the job")


@SUITE.check("a_job_runs")
def it_runs_where_it_was_asked(subject: ExecutorSubject) -> None:
    """The working directory is the launch's."""
    launch, told = subject.first
    if os.path.realpath(told["cwd"]) != os.path.realpath(launch.working_dir):
        raise Unmet("the job works in another directory", found=told["cwd"])


@SUITE.check("a_job_runs")
def what_it_prints_is_kept(subject: ExecutorSubject) -> None:
    """stdout and stderr of a job are in its run's folder, be it a megabyte: all there is of one that dies early."""
    launch = subject.launch("print")
    job = subject.submitted(launch)
    subject.wait(lambda: (launch.folder / "told.json").is_file() or subject.executor.status(job).state.over)
    if not (launch.folder / "told.json").is_file():
        subject.executor.cancel(job)
        raise Unmet("a job that prints a megabyte does not get to its end", hint="a file, not a pipe")
    pid = subject.told(launch)["pid"]
    subject.over(job)
    for name in ("out", "err"):
        if not subject.kept(f"kit {name} {pid}", job, launch):
            raise Unmet(f"std{name} of a job is not in its run's folder", hint="launch.folder / 'console.txt'")


@SUITE.check("what_it_prints_is_kept")
def a_run_can_be_submitted_again(subject: ExecutorSubject) -> None:
    """`--resume RUN`: the same run is another job, and what the first one printed is still there."""
    launch, jobs, pids = subject.launch("run"), [], []
    for _ in range(2):
        (launch.folder / "told.json").unlink(missing_ok=True)
        jobs.append(subject.submitted(launch))
        pids.append(subject.told(launch)["pid"])
        subject.over(jobs[-1])
    if jobs[0] == jobs[1]:
        raise Unmet("a run's second job has the name of its first", found=jobs[0], hint="number each submission")
    for pid, number in zip(pids, ("first", "second"), strict=True):
        if not subject.kept(f"kit out {pid}", jobs[1], launch):
            raise Unmet(f"what a run's {number} job printed is not in its folder", hint='open("ab")')


@SUITE.check("submitting_does_not_wait", "variables_arrive")
def secrets_are_not_written_down(subject: ExecutorSubject) -> None:
    """A secret variable reaches the job, or is refused; it is in no file of the run and in no command line."""
    launch = subject.launch("wait", environment={"KIT_TOKEN": SECRET}, env_vars={"KIT_API_KEY": SECRET})
    try:
        job = subject.executor.submit(launch)
    except StepsError:
        return
    try:
        environment = subject.told(launch)["environment"]
        for name in ("KIT_API_KEY", "KIT_TOKEN"):
            if environment.get(name) != SECRET:
                raise Unmet("a secret variable neither arrives nor is refused", found=f"{name}={environment.get(name)}")
        _require_unwritten(launch.folder)
        if SECRET in job:
            raise Unmet("a secret variable is in the job's name")
        for line in Path("/proc").glob("[0-9]*/cmdline"):
            if SECRET.encode() in _bytes_of(line):
                raise Unmet("a secret variable is in a command line, which every user of the machine sees")
    finally:
        (launch.folder / "go").touch()
        subject.over(job)


@SUITE.check("a_job_runs")
def what_cannot_start_is_told(subject: ExecutorSubject) -> None:
    """A working directory that is not there is an error with a code and no secret in it, or a job that is over."""
    launch = subject.launch("run", environment={"KIT_TOKEN": SECRET}, env_vars={"KIT_API_KEY": SECRET})
    try:
        job = subject.executor.submit(replace(launch, working_dir=subject.folder / "absent"))
    except StepsError as error:
        if SECRET in json.dumps(error.to_dict(), default=str):
            raise Unmet("the error of a refused submission shows a secret variable", found=error.code) from None
    except Exception as error:
        raise Unmet(
            f"submitting raises {type(error).__name__}: {error}",
            hint="raise RequestError or UnsupportedError, with a hint to paste",
        ) from error
    else:
        subject.over(job)
    _require_unwritten(launch.folder)


@SUITE.check("a_job_runs")
def a_failure_is_not_done(subject: ExecutorSubject) -> None:
    """A job that ends with exit code 3 or by SIGKILL is FAILED (or OUT_OF_MEMORY, LOST), and is not tried again."""
    for kind, state in (("fail", JobState.FAILED), ("kill", JobState.OUT_OF_MEMORY)):
        launch = subject.launch(kind)
        found = subject.over(subject.submitted(launch)).state
        if found not in (JobState.FAILED, state, JobState.LOST):
            raise Unmet(f"a job that failed ({kind}) is told as something else", found=found)
        begun = (launch.folder / "begun").read_text().count("\n")
        if begun != 1:
            raise Unmet("a job that failed is started again", found=f"begun {begun} times", hint="no retries")


@SUITE.check("submitting_does_not_wait")
def a_running_job_is_known(subject: ExecutorSubject) -> None:
    """While it works it is PENDING or RUNNING, and so says another object of the executor's."""
    with subject.working(subject.launch("wait")) as job:
        for executor in (subject.executor, find_executor(subject.name)):
            state = executor.status(job).state
            if state.over:
                raise Unmet("a job that works is told as over", found=state, hint="the name alone has to find the job")


@SUITE.check("a_running_job_is_known")
def a_job_outlives_its_submitter(subject: ExecutorSubject) -> None:
    """`-b`: the terminal is closed, the job goes on, and another process finds it by its name."""
    folder = subject.folder / "another"
    folder.mkdir()
    request = [subject.name, str(folder), dict(subject.keys), subject.seconds]
    path = os.pathsep.join(entry for entry in sys.path if entry)
    done = subprocess.run(
        [sys.executable, "-c", _SUBMITTER, json.dumps(request)],
        start_new_session=True,
        capture_output=True,
        timeout=subject.seconds + 30,
        env={**os.environ, "PYTHONPATH": path},
    )
    if not (folder / "submitted").is_file():
        raise Unmet("a job cannot be submitted from another process", found=done.stderr.decode()[-400:])
    run_folder, job = json.loads((folder / "submitted").read_text())
    try:
        if not subject.wait(lambda: Path(run_folder, "told.json").is_file() or subject.executor.status(job).state.over):
            raise Unmet(f"a job of another process did not begin within {subject.seconds:.0f} s")
        time.sleep(0.1)  # what ends with the terminal has ended
        state = subject.executor.status(job).state
        if state.over or Path(run_folder, "stopped").exists():
            raise Unmet("a job ends with the process that submitted it", found=state, hint="start_new_session=True")
    finally:
        Path(run_folder, "go").touch()
        subject.over(job)


@SUITE.check("a_running_job_is_known")
def nobody_to_ask_is_no_end(subject: ExecutorSubject) -> None:
    """Where the scheduler's commands are not there to ask, that is an error with a code: the job is not LOST."""
    with subject.working(subject.launch("wait")) as job:
        path = os.environ.get("PATH", "")
        os.environ["PATH"] = "/nonexistent"
        try:
            state = find_executor(subject.name).status(job).state
        except StepsError:
            return
        except Exception as error:
            raise Unmet(f"asking where no command is on the PATH raises {type(error).__name__}: {error}") from error
        finally:
            os.environ["PATH"] = path
        if state.over:
            raise Unmet(
                "a job that works is told as over when nobody can be asked", found=state, hint="raise RetryableError"
            )


@SUITE.check("a_running_job_is_known")
def cancel_stops_a_job(subject: ExecutorSubject) -> None:
    """A cancelled job gets SIGTERM, itself and not only the shell of its setup_lines, and nothing of it is left."""
    _cancel(subject, subject.launch("wait"), "")
    _cancel(subject, subject.launch("wait", setup_lines=["true"]), " behind setup_lines")


@SUITE.check("a_job_runs")
def an_unknown_job_is_lost(subject: ExecutorSubject) -> None:
    """A name of no job is LOST, whatever is in it; cancelling it, or a job that is over, does nothing."""
    launch = subject.launch("run")
    job = subject.submitted(launch)
    subject.over(job)
    for name in _NO_JOBS:
        try:
            state: object = subject.executor.status(name).state
        except Exception as error:
            state = f"{type(error).__name__}: {error}"
        if state is not JobState.LOST:
            raise Unmet(f"{name!r} is not a job", found=state, hint="JobStatus(JobState.LOST)")
    for name in (job, *_NOT_THERE):
        try:
            subject.executor.cancel(name)
        except Exception as error:
            raise Unmet(
                f"cancelling {name!r} raises {type(error).__name__}: {error}", hint="do nothing for what does not work"
            ) from error
    if Path("kit-was-here").exists():
        Path("kit-was-here").unlink()
        raise Unmet("a job's name is run by a shell")


def _cancel(subject: ExecutorSubject, launch: Launch, kind: str) -> None:
    with subject.working(launch) as job:
        pid, stopped = subject.told(launch)["pid"], launch.folder / "stopped"
        subject.executor.cancel(job)
        if not subject.wait(lambda: stopped.is_file() or subject.executor.status(job).state.over):
            raise Unmet(f"a cancelled job{kind} goes on")
        subject.over(job)
        if not stopped.is_file():
            raise Unmet(f"a cancelled job{kind} is not told with SIGTERM", hint="it saves what it has on SIGTERM")
    mark = str(launch.folder).encode()  # another machine's process is not seen
    if not subject.wait(lambda: mark not in _bytes_of(Path(f"/proc/{pid}/cmdline"))):
        raise Unmet(f"a cancelled job{kind} leaves a process")


def _require_unwritten(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file() and path.name not in OF_THE_JOB and SECRET.encode() in path.read_bytes():
            raise Unmet("a secret variable is written down", where=str(path))


def _bytes_of(path: Path) -> bytes:
    """What is in a file; nothing of one that is not there."""
    try:
        return path.read_bytes()
    except OSError:
        return b""
