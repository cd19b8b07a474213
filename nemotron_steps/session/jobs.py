"""Runs whose jobs work elsewhere, as commands look at them: their files are brought here, their executors asked.

What was brought here before is worth showing when neither answers, but not in silence: what is missing is said, once
for as long as it lasts, and everything is asked for again at the next look.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from nemotron_steps.errors import RequestError, StepsError

if TYPE_CHECKING:
    from nemotron_steps.artifacts.store import ArtifactStore
    from nemotron_steps.runs.executors.base import JobStatus
    from nemotron_steps.runs.run_folder import RunInfo

AT_WORK = ("running", "submitted")
"""States of a run that may still change."""
FETCH_SECONDS = 5.0
"""How often somebody elsewhere is asked, while a run is followed: schedulers and ssh do not bear it every second."""


class JobView:
    """A run, looked at again and again.

    Args:
        run: its id, a part of it, or `latest`.
        say: is called with what is missing when it begins to be, and when it is there again.
    """

    def __init__(self, store: ArtifactStore, run: str, say: Callable[[str], None] = lambda text: None) -> None:
        self._store = store
        self._run = run
        self._files = _Outage("what its job wrote lately is missing", say)
        self._state = _Outage("its job cannot be asked about", say)
        self._followed = -math.inf
        self.job: JobStatus | None = None
        """What the executor said last."""

    def due(self, info: RunInfo) -> bool:
        """Whether who follows the run should ask and look again: of a job of this machine always."""
        now = time.monotonic()
        if info.executor != "local" and now - self._followed < FETCH_SECONDS:
            return False
        self._followed = now
        return True

    def look(self) -> RunInfo:
        """The run, with what its job wrote elsewhere brought here."""
        from nemotron_steps.runs.run_folder import get_run

        info = get_run(self._store, self._run)
        self._run = info.id
        if not info.job:
            return info
        from nemotron_steps.runs.launch import refresh

        try:
            info = refresh(self._store, info)
        except StepsError as error:
            self._files.goes_on(error)
        else:
            self._files.is_over()
        return info

    def ask(self, info: RunInfo) -> JobStatus | None:
        """What the executor says of the run's job; None where it says nothing, or there is none."""
        if not info.job:
            return None
        from nemotron_steps.runs.launch import job_status

        try:
            self.job = job_status(self._store, info)
        except StepsError as error:
            self.job = None
            self._state.goes_on(error)
        else:
            self._state.is_over()
        return self.job

    def never_began(self, info: RunInfo) -> bool:
        """Whether a submitted run's job ended before the run began (its request turned out to be wrong)."""
        if info.status != "submitted":
            # It speaks for itself now; what the queue said before is no longer so.
            self.job = None
            self._state.is_over()
            return False
        job = self.ask(info)
        return job is not None and job.state.over

    def missing(self) -> list[str]:
        """What was asked for and did not come, at the last look."""
        return [f"{each.what}: {each.why}" for each in (self._files, self._state) if each.why is not None]


class _Outage:
    """Something that was asked for and did not come. It is said when it begins and when it ends."""

    def __init__(self, what: str, say: Callable[[str], None]) -> None:
        self.what = what
        self.why: str | None = None
        self._say = say

    def goes_on(self, error: StepsError) -> None:
        begins = self.why is None
        self.why = f"{error.what} ({error.found})" if error.found else error.what
        if begins:
            self._say(f"{self.what}: {self.why}")

    def is_over(self) -> None:
        if self.why is not None:
            self.why = None
            self._say(f"no longer: {self.what}")


def said(job: JobStatus) -> str:
    """What an executor says about a job, in a line."""
    return f"{job.state.value} ({job.detail})" if job.detail else job.state.value


def not_started(store: ArtifactStore, info: RunInfo) -> StepsError:
    """The error of a run whose job never began it, with what the job said."""
    from nemotron_steps.runs.launch import job_output

    printed, said = job_output(store, info)
    return RequestError(
        f"run '{info.id}' ended before it started",
        where=shown_path(printed) if printed is not None else f"run {info.id}",
        found="\n".join(said) or None,
        hints=(f"steps run --resume {info.id}" + ("   # once that is mended" if said else ""),),
    )


def shown_path(path: Path) -> str:
    """A path as short as it can be pasted: relative to the working directory when it is below it."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative
