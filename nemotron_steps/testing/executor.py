"""Checks of how an executor answers for its jobs: asked about, cancelled, several at once, from another process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from nemotron_steps.errors import StepsError
from nemotron_steps.runs.executors.base import JobState, Launch, find_executor
from nemotron_steps.testing.executor_launch import LAUNCH_SUITE
from nemotron_steps.testing.executor_profile import PROFILE_SUITE
from nemotron_steps.testing.executor_subject import ExecutorSubject, bytes_of
from nemotron_steps.testing.suite import NotApplicable, Suite, Unmet

__all__ = ["PROFILE_SUITE", "SUITE", "ExecutorSubject"]

_NO_JOBS = ("", "0", "999999999", "kit no job", "../../etc", "999999999@1", "a; touch kit-was-here", "\u0663@1", "-1")
_NOT_THERE = ("999999999", "999999999@999999999", "kit no job", "a; touch kit-was-here")
"""Names of no job that are cancelled: no number among them is a process, a group ("-1" and "0" are) or can become one,
so that a first draft with `os.kill(int(job), SIGTERM)` ends nothing of its author's."""
_AT_ONCE = 3
_SUBMITTER = """
import json, os, signal, sys
from pathlib import Path
from nemotron_steps.testing.executor_subject import ExecutorSubject
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored under nohup, and then by what it starts
name, folder, keys, seconds = json.loads(sys.argv[1])
subject = ExecutorSubject(name, Path(folder), keys, seconds)
launch = subject.launch("wait")
job = subject.executor.submit(launch)
Path(folder, "submitted").write_text(json.dumps([str(launch.folder), job]))
os.killpg(0, signal.SIGHUP)
"""
"""A process that submits a job and ends as a terminal that is closed ends what runs in it."""

SUITE: Suite[ExecutorSubject] = Suite(PROFILE_SUITE, LAUNCH_SUITE)


@SUITE.check("a_job_runs")
def names_are_plain(subject: ExecutorSubject) -> None:
    """A job's name is one line of text, another one for each job."""
    jobs = [subject.submitted(subject.launch("run")) for _ in range(2)]
    for job in jobs:
        if not isinstance(job, str) or not job.strip() or not job.isprintable():
            raise Unmet("a job's name is no line of text", found=repr(job))
    for job in jobs:
        subject.over(job)
    if jobs[0] == jobs[1]:
        raise Unmet("two jobs have one name", found=jobs[0])


@SUITE.check("submitting_does_not_wait")
def a_running_job_is_known(subject: ExecutorSubject) -> None:
    """While it works it is PENDING or RUNNING, and so says another object of the executor's."""
    with _working(subject) as (job, _):
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
        subject.end(job)


@SUITE.check("a_running_job_is_known")
def nobody_to_ask_is_no_end(subject: ExecutorSubject) -> None:
    """Where the scheduler's commands are not there to ask, that is an error with a code: the job is not LOST."""
    with _working(subject) as (job, _):
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


@SUITE.check("a_job_runs")
def a_failure_is_over(subject: ExecutorSubject) -> None:
    """A job that ends with an exit code is FAILED, or LOST where nobody knows; never DONE."""
    state = subject.over(subject.submitted(subject.launch("fail"))).state
    if state not in (JobState.FAILED, JobState.LOST):
        raise Unmet("a job that ended with exit code 3 is told as something else", found=state)


@SUITE.check("a_job_runs")
def a_killed_job_is_not_done(subject: ExecutorSubject) -> None:
    """A job that SIGKILL ended, as too much memory does, is FAILED, OUT_OF_MEMORY or LOST; nobody cancelled it."""
    state = subject.over(subject.submitted(subject.launch("kill"))).state
    if state not in (JobState.FAILED, JobState.OUT_OF_MEMORY, JobState.LOST):
        raise Unmet("a job that was killed is told as something else", found=state)


@SUITE.check("a_failure_is_over")
def a_failed_job_is_not_tried_again(subject: ExecutorSubject) -> None:
    """A job that failed began once: whether to try again is the run's to say."""
    launch = subject.launch("fail")
    subject.over(subject.submitted(launch))
    begun = (launch.folder / "begun").read_text().count("\n")
    if begun != 1:
        raise Unmet(
            "a job that failed is started again", found=f"begun {begun} times", hint="no retries of the queue's"
        )


@SUITE.check("a_running_job_is_known")
def cancel_stops_a_job(subject: ExecutorSubject) -> None:
    """A job that is cancelled gets SIGTERM, and nothing of it is left."""
    launch = subject.launch("wait")
    job = subject.submitted(launch)
    pid = subject.told(launch)["pid"]
    _cancelled(subject, job, launch, "")
    if not subject.wait(lambda: not _runs(pid, launch)):
        raise Unmet("a cancelled job goes on")


@SUITE.check("cancel_stops_a_job")
def cancel_reaches_past_setup_lines(subject: ExecutorSubject) -> None:
    """SIGTERM reaches the job, not only the shell that ran the setup_lines before it."""
    launch = subject.launch("wait", setup_lines=["export KIT_SETUP=done"])
    job = subject.submitted(launch)
    subject.told(launch)
    _cancelled(subject, job, launch, " behind setup_lines")


@SUITE.check("cancel_stops_a_job")
def a_job_can_be_cancelled_at_once(subject: ExecutorSubject) -> None:
    """One that is cancelled before it began does not begin, or ends."""
    launch = subject.launch("wait")
    job = subject.submitted(launch)
    subject.executor.cancel(job)
    if not subject.wait(lambda: subject.executor.status(job).state.over):
        (launch.folder / "go").touch()
        raise Unmet("a job that is cancelled as soon as it is submitted goes on")


@SUITE.check("a_job_runs", "an_unknown_job_is_lost")
def cancel_of_what_is_over_does_nothing(subject: ExecutorSubject) -> None:
    """A job that is over, or that never was, can be cancelled: nothing happens."""
    job = subject.submitted(subject.launch("run"))
    subject.over(job)
    for name in (job, *_NOT_THERE):
        try:
            subject.executor.cancel(name)
        except Exception as error:
            raise Unmet(
                f"cancelling {name!r} raises {type(error).__name__}: {error}", hint="do nothing for what does not work"
            ) from error
    _expect_no_shell()


@SUITE.check("is_registered")
def an_unknown_job_is_lost(subject: ExecutorSubject) -> None:
    """A name of no job is LOST, whatever is in it."""
    for name in _NO_JOBS:
        try:
            state = subject.executor.status(name).state
        except Exception as error:
            raise Unmet(
                f"asking about {name!r} raises {type(error).__name__}: {error}", hint="JobStatus(JobState.LOST)"
            ) from error
        if state is not JobState.LOST:
            raise Unmet(f"{name!r} is no job, and told as {state}", hint="JobStatus(JobState.LOST)")
    _expect_no_shell()


@SUITE.check("a_running_job_is_known")
def jobs_do_not_mix(subject: ExecutorSubject) -> None:
    """Of two jobs at once, cancelling one leaves the other."""
    with _working(subject) as (second, launch):
        with _working(subject):
            pass
        if subject.executor.status(second).state.over or (launch.folder / "stopped").exists():
            raise Unmet("cancelling a job ends another")


@SUITE.check("names_are_plain", "words_arrive_as_they_are")
def jobs_at_once_are_their_own(subject: ExecutorSubject) -> None:
    """Several submitted at the same time, from threads, each run with their own words."""
    launches = [subject.launch("run", f"word {number}") for number in range(_AT_ONCE)]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        jobs = list(pool.map(subject.submitted, launches))
    for job in jobs:
        subject.over(job)
    for launch in launches:
        if not (launch.folder / "told.json").is_file() or subject.told(launch)["words"] != [*launch.arguments[1:]]:
            raise Unmet("of jobs that are submitted at the same time, one is given another's launch")


@SUITE.check("a_job_runs")
def fetch_keeps_what_is_here(subject: ExecutorSubject) -> None:
    """`fetch` brings a run's folder up to date, as often as it is called, and takes nothing away."""
    fetch = getattr(subject.executor, "fetch", None)
    if fetch is None:
        raise NotApplicable("its jobs write where this machine sees it")
    launch = subject.launch("run")
    job = subject.submitted(launch)
    subject.told(launch)
    subject.over(job)
    (launch.folder / "kit.here").write_text("here")
    for _ in range(2):
        fetch(job, launch.folder)
        gone = [name for name in ("told.json", "kit.here") if not (launch.folder / name).is_file()]
        if gone:
            raise Unmet(f"fetch takes away {', '.join(gone)} of a run's folder", hint="copy what is newer there")


@contextmanager
def _working(subject: ExecutorSubject) -> Iterator[tuple[str, Launch]]:
    """A job that works meanwhile."""
    launch = subject.launch("wait")
    job = subject.submitted(launch)
    try:
        subject.told(launch)
        yield job, launch
    finally:
        subject.end(job)


def _cancelled(subject: ExecutorSubject, job: str, launch: Launch, kind: str) -> None:
    """Cancel a job and wait until it is over. Unmet if it was not told."""
    subject.executor.cancel(job)
    try:
        if not subject.wait(lambda: (launch.folder / "stopped").is_file() or subject.executor.status(job).state.over):
            raise Unmet(f"a cancelled job{kind} goes on")
        subject.over(job)
        if not (launch.folder / "stopped").is_file():
            raise Unmet(f"a cancelled job{kind} is not told with SIGTERM", hint="it saves what it has on SIGTERM")
    finally:
        (launch.folder / "go").touch()


def _expect_no_shell() -> None:
    if Path("kit-was-here").exists():
        Path("kit-was-here").unlink()
        raise Unmet("a job's name is run by a shell")


def _runs(pid: int, launch: Launch) -> bool:
    """Whether a job's process is still there (another machine's is not seen)."""
    return str(launch.folder).encode() in bytes_of(Path(f"/proc/{pid}/cmdline"))
