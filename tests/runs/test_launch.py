"""A run that is handed to an executor and followed to its end: what it is told, and how its end is read."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nemotron_steps.artifacts.backend import FsspecBackend
from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.config.profiles import Profile
from nemotron_steps.errors import (
    DataError,
    InterruptedRunError,
    RequestError,
    RetryableError,
    StepFailedError,
    UnsupportedError,
)
from nemotron_steps.runs import launch as launching
from nemotron_steps.runs.executors.base import JobState, JobStatus, Launch
from nemotron_steps.runs.locks import hold
from nemotron_steps.runs.run_folder import RunFolder, RunInfo, get_run
from tests.runs.clock import Clock

FAR = Profile(executor="far")
Answer = JobState | BaseException | Callable[[], JobState]


class Queue:
    """An executor that says of its job what it is told to, the last word for ever."""

    def __init__(self) -> None:
        self.answers: list[Answer] = [JobState.RUNNING]
        self.refusal: BaseException | None = None
        self.launches: list[Launch] = []
        self.asked = self.cancelled = 0
        self.fetched: list[Path] = []
        self.times: list[float] = []

    def submit(self, launch: Launch) -> str:
        self.launches.append(launch)
        if self.refusal is not None:
            raise self.refusal
        return f"job-{len(self.launches)}"

    def status(self, job: str) -> JobStatus:
        self.asked += 1
        self.times.append(launching.time.monotonic())
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, BaseException):
            raise answer
        return JobStatus(answer if isinstance(answer, JobState) else answer(), "as it says")

    def cancel(self, job: str) -> None:
        self.cancelled += 1


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(launching, "time", clock)
    return clock


@pytest.fixture
def queue(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Queue:
    queue = Queue()
    monkeypatch.setattr(launching, "find_executor", lambda name: queue)
    return queue


def submitted(store: ArtifactStore, **changes: Any) -> RunInfo:
    folder = RunFolder(store, "r1")
    folder.update(folder.load() or folder.create("toy", {}), **changes)
    return launching.submit(store, FAR, run_id="r1")


def ends(store: ArtifactStore, status: str, error: Any = None) -> None:
    """The job writes how its run ended."""
    RunFolder(store, "r1").update(get_run(store, "r1"), status=status, error=error)


def follow(store: ArtifactStore) -> RunInfo:
    return launching.follow(store, "r1", lambda text: None)


def test_a_run_that_is_handed_in_again_says_nothing_of_how_it_ended_before(store: ArtifactStore, queue: Queue) -> None:
    info = submitted(store, status="failed", error=DataError("no rows").to_dict(), pid=4321, attempts=1)
    assert (info.status, info.error, info.pid, info.job) == ("submitted", None, 0, "job-1")


def test_a_run_that_somebody_works_on_is_not_handed_in(store: ArtifactStore, queue: Queue) -> None:
    folder = RunFolder(store, "r1")
    folder.create("toy", {})
    with hold(folder.lock, {}, lambda holder: None), pytest.raises(RequestError, match="still being worked on"):
        submitted(store, status="running")
    with hold(folder.submit_lock, {}, lambda holder: None), pytest.raises(RequestError, match="submitted already"):
        launching.submit(store, FAR, run_id="r1")
    assert queue.launches == []


@pytest.mark.parametrize(
    ("refusal", "status", "what"),
    [
        (KeyboardInterrupt(), "interrupted", "KeyboardInterrupt: "),
        (OSError("no sbatch, with --api-key sk-1234567890abcdef"), "failed", "OSError: no sbatch, with --api-key ***"),
        (RequestError("the queue is closed"), "failed", "the queue is closed"),
    ],
)
def test_a_submission_that_ends_early_ends_its_run(
    store: ArtifactStore, queue: Queue, refusal: BaseException, status: str, what: str
) -> None:
    queue.refusal = refusal
    with pytest.raises(type(refusal)):
        submitted(store)
    info = get_run(store, "r1")
    assert info.error is not None and (info.status, info.error["what"], info.job) == (status, what, "")


def test_only_this_machine_works_on_a_home_that_is_no_folder(
    tmp_path: Path, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ArtifactStore(FsspecBackend(f"memory://launched-{tmp_path.name}", tmp_path / "here"))
    RunFolder(store, "r1").create("toy", {})
    with pytest.raises(UnsupportedError, match="a file system both sides see"):
        launching.submit(store, FAR, run_id="r1")
    assert launching.submit(store, Profile(), run_id="r1").job == "job-1"


@pytest.mark.parametrize("state", [JobState.DONE, JobState.FAILED])
def test_the_word_of_a_run_may_come_a_while_after_its_jobs_end(
    store: ArtifactStore, queue: Queue, clock: Clock, state: JobState
) -> None:
    submitted(store)

    def late() -> JobState:
        if clock.now > 1015:
            ends(store, "done")
        return state

    queue.answers = [late]
    assert follow(store).status == "done"
    assert 1015 < clock.now < 1030


@pytest.mark.parametrize(
    ("state", "error", "waited"),
    [
        (JobState.DONE, StepFailedError, 20),
        (JobState.FAILED, StepFailedError, 20),
        (JobState.OUT_OF_MEMORY, StepFailedError, 0),
        (JobState.LOST, RetryableError, 0),
        (JobState.TIMED_OUT, RetryableError, 0),
        (JobState.CANCELLED, InterruptedRunError, 0),
    ],
)
def test_a_job_that_ended_without_its_runs_word_is_told_by_how_it_ended(
    store: ArtifactStore, queue: Queue, clock: Clock, state: JobState, error: type[Exception], waited: int
) -> None:
    submitted(store)
    RunFolder(store, "r1").update(get_run(store, "r1"), status="running", host="elsewhere", pid=7)
    (RunFolder(store, "r1").path / "slurm-7.txt").write_text("1\n2\n\n3\nno room for it\n")
    queue.answers = [state]
    with pytest.raises(error) as caught:
        follow(store)
    told = caught.value.found or ""  # type: ignore[attr-defined]
    assert told.endswith("\n\n3\nno room for it") is (error is StepFailedError)
    assert waited <= clock.now - 1000 <= waited + 6
    again = "the job's own output" if error is StepFailedError else "steps run --resume r1"
    assert any(again in hint for hint in caught.value.hints)  # type: ignore[attr-defined]
    assert not isinstance(caught.value, InterruptedRunError) or "what was committed is kept" in caught.value.what


def test_a_failed_run_whose_job_goes_on_is_given_a_minute_to_begin_again(
    store: ArtifactStore, queue: Queue, clock: Clock
) -> None:
    submitted(store)
    ends(store, "failed", DataError("no rows").to_dict())
    queue.answers = [JobState.RUNNING]
    with pytest.raises(DataError, match="no rows"):
        follow(store)
    assert 60 < clock.now - 1000 < 66


def test_a_failed_run_that_is_back_in_its_queue_is_waited_for_until_its_next_attempt_ends(
    store: ArtifactStore, queue: Queue, clock: Clock
) -> None:
    submitted(store, attempts=1)
    ends(store, "failed", DataError("no rows").to_dict())

    def goes_on() -> JobState:
        ends(store, "done")
        return JobState.RUNNING

    queue.answers = [JobState.RUNNING, *[JobState.PENDING] * 5, *[JobState.RUNNING] * 30, goes_on]
    assert follow(store).status == "done"
    assert clock.now - 1000 > 35 * 5


def test_a_queued_job_that_is_cancelled_ends_its_run_however_long_it_takes(
    store: ArtifactStore, queue: Queue, clock: Clock
) -> None:
    info = submitted(store)
    queue.answers = [JobState.PENDING]
    launching.cancel(store, info)
    assert get_run(store, "r1").status == "submitted" and clock.now < 1050
    queue.answers = [JobState.PENDING, *[JobState.RUNNING] * 20, JobState.CANCELLED]
    launching.cancel(store, info)
    assert get_run(store, "r1").status == "interrupted"
    with pytest.raises(InterruptedRunError, match="cancelled before it began"):
        follow(store)
