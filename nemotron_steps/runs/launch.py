"""Runs that another process works on: submit them, follow their log, ask how they stand, cancel them.

The job's name is kept in `job.json` beside run.json, which belongs to the process that works on the run.
"""

import errno
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from nemotron_steps import errors
from nemotron_steps.artifacts.files import to_json_bytes, write_atomic
from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.config.profiles import Profile
from nemotron_steps.config.secrets import redact, redact_text
from nemotron_steps.errors import (
    InterruptedRunError,
    RequestError,
    RetryableError,
    StepFailedError,
    StepsError,
    UnsupportedError,
    WorkerLostError,
)
from nemotron_steps.runs.executors.base import Executor, JobState, JobStatus, Launch, find_executor
from nemotron_steps.runs.locks import hold, hold_if_free
from nemotron_steps.runs.report.follow import Tail
from nemotron_steps.runs.run_folder import (
    FAILED,
    INTERRUPTED,
    JOB_FILE,
    JOB_NAME,
    KILLED,
    RUNNING,
    SUBMITTED,
    RunFolder,
    RunInfo,
    get_run,
    refuse_busy,
)

_POLL_S = 0.5
_FETCH_S = 5.0
"""How often an executor of another machine is asked about a job, and the folder of a run that works there fetched."""
_SILENCE_S = 600.0
"""How long an executor may be out of reach before whoever follows a job gives up; the job goes on without it."""
_CANCEL_S = 30.0
"""How long a job that waited in a queue may take to be out of it."""
_LAG_S = 20.0
"""How long after a job's end its run folder may take to show it (shared file systems)."""
_RESTART_S = 60.0
"""Seconds that a job may go on after its run failed: its scheduler may have begun it again, and the new process has yet
to say so."""


def submit(
    store: ArtifactStore,
    profile: Profile,
    *,
    run_id: str,
    environment: Mapping[str, str] | None = None,
    request: Mapping[str, Any] | None = None,
    forced: Iterable[str] = (),
    paths: tuple[Path, ...] = (),
    attached: bool = False,
    force_squash: bool = False,
) -> RunInfo:
    """Start a run under a profile's executor."""
    folder = RunFolder(store, run_id)
    holder = {"run": run_id}
    with hold(folder.submit_lock, holder, lambda other: refuse_busy(run_id, other, "being submitted already")):
        before = get_run(store, run_id)
        if before.status == RUNNING:
            refuse_busy(run_id, vars(before))
        says = before if request is None else replace(before, request=dict(request))
        says = replace(says, forced=dict.fromkeys(forced, "") or before.forced)
        words, name = ("--resume", run_id, "--home", store.backend.url), profile.executor
        launch = Launch(
            run_id, folder.path, words, profile, Path.cwd(), environment or {}, paths, attached, force_squash
        )
        try:
            executor = find_executor(name)
            if name != "local" and "://" in store.backend.url:
                raise UnsupportedError(
                    "a job follows its run folder, which must be on a file system both sides see",
                    where=store.backend.url,
                    expected="--home FOLDER on a shared file system",
                )
            # Before it starts: whoever follows the run must not take its last attempt's end for this one's.
            folder.update(says, status=SUBMITTED, error=None, pid=0)
            job: Any = executor.submit(launch)
            # What cannot be read back would make the run itself unreadable.
            if not (isinstance(job, str) and JOB_NAME.fullmatch(job)):
                raise UnsupportedError(
                    f"executor '{name}' gives no name for the job that it was to submit",
                    where=f"run {run_id}",
                    expected="a str of one line, 1 to 501 characters, that begins with no space and no '-'",
                    found=repr(job),
                )
        except BaseException as error:
            if before.attempts:
                folder.update(before)
            else:  # a run that never began also says what it is forced to make
                shown = error if isinstance(error, StepsError) else StepFailedError(f"{type(error).__name__}: {error}")
                status = INTERRUPTED if isinstance(error, KeyboardInterrupt) else FAILED
                folder.update(before, status=status, error=redact(shown.to_dict()), forced=dict(says.forced))
            raise
        write_atomic(folder.path / JOB_FILE, to_json_bytes({"executor": name, "job": job, "submitted": time.time()}))
    return get_run(store, run_id)


def refresh(store: ArtifactStore, info: RunInfo) -> RunInfo:
    """Bring here what a job wrote into its run's folder elsewhere, for executors whose jobs do; what the run is now."""
    fetch = getattr(find_executor(info.executor), "fetch", None) if info.job else None
    if fetch is None:
        return info
    fetch(info.job, RunFolder(store, info.id).path)
    return get_run(store, info.id)


def job_status(store: ArtifactStore, info: RunInfo) -> JobStatus | None:
    """What the executor says about a submitted run's job; None for a run that no executor started."""
    if not info.job:
        return None
    status = _status(find_executor(info.executor), info)
    if status.state is not JobState.CANCELLED or info.status != SUBMITTED:
        return status
    # Nobody else can write down that a job is over which was cancelled before it began.
    folder = RunFolder(store, info.id)
    error = InterruptedRunError("the job was cancelled before it began", where=f"run {info.id}").to_dict()
    try:
        with hold_if_free(folder.submit_lock) as free:
            now = get_run(store, info.id)
            # One that began in the meantime says itself how it ended; handed in again, it has another job.
            if free and now.status == SUBMITTED and now.job == info.job:
                folder.update(now, status=INTERRUPTED, error=error)
    except OSError as failed:  # whoever may only look at the home leaves it as it is
        if failed.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
    return status


def _status(executor: Executor, info: RunInfo) -> JobStatus:
    """What a run's executor says about its job, checked: it may be another package's."""
    status: Any = executor.status(info.job)
    if not (isinstance(status, JobStatus) and isinstance(status.state, JobState) and isinstance(status.detail, str)):
        what, expected = f"executor '{info.executor}' does not say where a job stands", "a JobStatus with a JobState"
        raise UnsupportedError(what, where=f"run {info.id}, job {info.job}", expected=expected, found=repr(status))
    return status


def cancel(store: ArtifactStore, info: RunInfo) -> None:
    """Ask a submitted run's job to stop. RequestError for a run that no executor started."""
    if not info.job:
        raise RequestError(f"run '{info.id}' was not submitted to an executor", hints=(f"steps status {info.id}",))
    executor = find_executor(info.executor)
    before = _status(executor, info).state
    executor.cancel(info.job)
    until = time.monotonic() + _CANCEL_S
    while before is JobState.PENDING and not _status(executor, info).state.over and time.monotonic() < until:
        time.sleep(_POLL_S)
    if before is not JobState.RUNNING:
        job_status(store, refresh(store, info))


def follow(store: ArtifactStore, run_id: str, write: Callable[[str], None]) -> RunInfo:
    """Copy a submitted run's log to `write` until the run is over; returns its final state."""
    log = Tail(store.backend.scratch / "runs" / run_id / "log.txt")
    ended = 0.0
    queued_again = -1  # attempts there were when the job went back into its queue
    inquiry = _Inquiry(store, write)
    while True:
        info = inquiry.look(get_run(store, run_id))
        for line in log.new():
            write(line.decode(errors="replace") + "\n")
        failure, status = error_of(info), inquiry.status
        if not _said(info) and (status is None or not status.state.over):
            ended = 0.0
            time.sleep(_POLL_S)
            continue
        ended = ended or time.monotonic()
        late = time.monotonic() - ended > _LAG_S
        if not _said(info) and status is not None:
            if late or status.state not in (JobState.DONE, JobState.FAILED):
                raise _job_error(store, info, status)
        elif failure is None:
            # The process that worked writes the report a moment after it said how the run ended.
            if late or (log.path.parent / "report.html").is_file():
                return info
        else:
            if status is not None and status.state is JobState.PENDING:
                queued_again, ended = info.attempts, 0.0
            over = status is None or status.state.over
            if over or (time.monotonic() - ended > _RESTART_S and queued_again != info.attempts):
                raise failure
        time.sleep(_POLL_S)


class _Inquiry:
    """What an executor says of a followed run's job. Where it is out of reach for a while, `write` says so once."""

    def __init__(self, store: ArtifactStore, write: Callable[[str], None]) -> None:
        self.status: JobStatus | None = None
        """None for a run that no executor started. RUNNING while nobody answers: nothing is known to be over."""
        self._store, self._write = store, write
        self._asked = float("-inf")
        self._known: tuple[str, int] | None = None
        self._silent_since: float | None = None

    def look(self, info: RunInfo) -> RunInfo:
        """Ask, if it is time or run.json says something new; what the run is now."""
        now = time.monotonic()
        if self._known == (info.status, info.attempts) and info.executor != "local" and now - self._asked < _FETCH_S:
            return info
        self._asked = now
        try:
            info = refresh(self._store, info)
            if not (_said(info) and error_of(info) is None):
                before, self.status = self.status, job_status(self._store, info)
                if self.status is not None and self.status.state is JobState.PENDING and self.status != before:
                    why = f": {self.status.detail}" if self.status.detail else ""
                    self._write(f"{info.executor} job {info.job} waits to start{why}\n")
            self._silent_since = None
        except RetryableError as error:
            self.status = JobStatus(JobState.RUNNING)
            if self._silent_since is None:
                self._silent_since = now
                self._write(f"{error.what}; the job may go on, and is asked about for {_SILENCE_S:.0f} s more\n")
            elif now - self._silent_since > _SILENCE_S:
                raise
        self._known = (info.status, info.attempts)
        return info


def _said(info: RunInfo) -> bool:
    """Whether run.json says how a run ended. A killed run could not say why: that is the executor's to tell."""
    return info.status not in (SUBMITTED, RUNNING, KILLED)


def error_of(info: RunInfo) -> StepsError | None:
    """What a run ended with, as its run.json says it; None where it says nothing."""
    if info.error is None:
        return None
    # The class by its name, if it is one of ours: its exit code is what this command returns.
    cls = getattr(errors, str(info.error.get("class")), None)
    if not (isinstance(cls, type) and issubclass(cls, StepsError)):
        cls = StepFailedError
    details = {name: info.error.get(name) for name in ("where", "expected", "found")}
    error: StepsError = cls(str(info.error.get("what", "the run failed")), hints=info.error.get("hints", ()), **details)
    error.code = str(info.error.get("code", error.code))  # type: ignore[misc]  # of another package's class
    return error


def _job_error(store: ArtifactStore, info: RunInfo, status: JobStatus) -> StepsError:
    where = f"run {info.id}, {info.executor} job {info.job}"
    again = f"steps run --resume {info.id}"
    if status.state is JobState.CANCELLED:
        return InterruptedRunError("the job was cancelled; what was committed is kept", where=where, hints=(again,))
    if status.state is JobState.LOST:
        what = "the run's process is gone" if info.executor == "local" else "the job's node was lost"
        return WorkerLostError(what, where=where, found=status.detail, hints=(again,))
    if status.state is JobState.TIMED_OUT:
        what = "the job reached its time limit; it goes on from the last checkpoint"
        hints = (again, "raise `time` in the profile, or set checkpointing.checkpoint_must_save_by")
        return RetryableError(what, where=where, found=status.detail, hints=hints)
    printed, last = job_output(store, info)
    what = f"the job ended ({status.state}) without a word from the run"
    hint = f"the job's own output is in {printed or f'the run folder of {info.id}'}"
    return StepFailedError(what, where=where, found="\n".join([status.detail, *last]), hints=(hint,))


def job_output(store: ArtifactStore, info: RunInfo) -> tuple[Path | None, list[str]]:
    """The newest file that a run's job printed to, and what it says: its first error, else its last three lines."""
    files = [file for file in (store.backend.scratch / "runs" / info.id).glob("*.txt") if file.name != "log.txt"]
    printed = max(files, key=lambda file: file.stat().st_mtime, default=None)
    lines = printed.read_text(errors="replace").strip().splitlines() if printed is not None else []
    refused = [line for line in lines if line.startswith("error")][:1]
    return printed, [redact_text(line) for line in refused or lines[-3:]]
