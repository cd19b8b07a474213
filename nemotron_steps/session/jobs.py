"""Runs whose jobs work elsewhere, as commands look at them: their files are brought here, their executors asked.

What was brought here before is worth showing when neither answers, but not in silence: what is missing is said, once
for as long as it lasts, and everything is asked for again at the next look.
"""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from nemotron_steps.errors import RequestError, StepsError

if TYPE_CHECKING:
    from nemotron_steps.artifacts.store import ArtifactStore
    from nemotron_steps.runs.executors.base import JobStatus
    from nemotron_steps.runs.run_folder import RunInfo

_FILES, _STATE = "what its job wrote lately is missing", "its job cannot be asked about"
AT_WORK = ("running", "submitted")
"""States of a run that may still change."""
Answer = TypeVar("Answer")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\x80-\x9f]")
FETCH_SECONDS = 5.0
"""How often somebody elsewhere is asked, while a run is followed: schedulers and ssh do not bear it every second."""


class JobView:
    """A run (its id, a part of it, or `latest`), looked at again and again; `say` is told what is missing."""

    def __init__(self, store: ArtifactStore, run: str, say: Callable[[str], None] = lambda text: None) -> None:
        self._store = store
        self._run = run
        self._say = say
        self._missing: dict[str, str] = {}
        """What was asked for and did not come at the last look → that, and why."""
        self._followed = -math.inf
        self.job: JobStatus | None = None
        """What the executor said last."""

    def now(self, info: RunInfo) -> RunInfo:
        """The run a moment later, for who follows it; what works elsewhere is asked every few seconds. RequestError if
        its job ended before the run began (its request turned out to be wrong): the run itself never says so."""
        from nemotron_steps.runs.run_folder import get_run

        moment = time.monotonic()
        if info.executor != "local" and moment - self._followed < FETCH_SECONDS:
            return get_run(self._store, info.id)
        self._followed = moment
        if info.status == "submitted":
            self.ask(info)
        else:  # it speaks for itself; what the queue said before is no longer so
            self.job = None
            self._missing.pop(_STATE, None)
        # Read after the job's end was seen: it may have begun and ended meanwhile.
        now = self.look()
        if now.status == "submitted" and self.job is not None and self.job.state.over:
            raise not_started(self._store, now)
        return now

    def look(self) -> RunInfo:
        """The run, with what its job wrote elsewhere brought here."""
        from nemotron_steps.runs.run_folder import get_run

        info = get_run(self._store, self._run)
        self._run = info.id
        if not info.job:
            return info
        from nemotron_steps.runs.launch import refresh

        return self._ask_for(_FILES, lambda: refresh(self._store, info)) or info

    def ask(self, info: RunInfo) -> JobStatus | None:
        """What the executor says of the run's job; None where it says nothing, or there is none."""
        if not info.job:
            return None
        from nemotron_steps.runs.launch import job_status

        self.job = self._ask_for(_STATE, lambda: job_status(self._store, info))
        return self.job

    def missing(self) -> list[str]:
        """What was asked for and did not come, at the last look."""
        return list(self._missing.values())

    def _ask_for(self, what: str, asked: Callable[[], Answer]) -> Answer | None:
        try:
            answer = asked()
        except StepsError as error:
            text = f"{what}: {error.what}" + (f" ({error.found})" if error.found else "")
            if what not in self._missing:
                self._say(text)
            self._missing[what] = text
            return None
        self._missing.pop(what, None)
        return answer


def said(job: JobStatus) -> str:
    """What an executor says about a job, in a line."""
    return f"{job.state.value} ({job.detail})" if job.detail else job.state.value


def not_started(store: ArtifactStore, info: RunInfo) -> StepsError:
    """The error of a run whose job never began it, with what the job said."""
    from nemotron_steps.runs.launch import job_output

    printed, said = job_output(store, info)
    where = shown_path(printed) if printed is not None else f"run {info.id}"
    found, hints = "\n".join(map(printable, said)) or None, (f"steps run --resume {info.id}",)
    return RequestError(f"run '{info.id}' ended before it started", where=where, found=found, hints=hints)


def shown_path(path: Path) -> str:
    """A path as short as it can be pasted: relative to the working directory when it is below it."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def printable(text: str) -> str:
    """Text from a file or a model without control characters, which could steer the terminal."""
    return _CONTROL.sub("�", text)
