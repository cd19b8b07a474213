"""`steps run`, top to bottom: compose and plan, look up what is cached, check, execute, say how to go on.

What works elsewhere is `submit`; what shows a plan or draws progress is handed in.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

from nemotron_steps.config.secrets import MASK
from nemotron_steps.engine.kernels import bound_spinning
from nemotron_steps.errors import (
    InterruptedRunError,
    PlanError,
    RequestError,
    RetryableError,
    StepsError,
    UnsupportedError,
)
from nemotron_steps.session.run_request import RunRequest
from nemotron_steps.session.session import Session
from nemotron_steps.session.supervise import announce

if TYPE_CHECKING:
    from nemotron_steps.resolver.plan import Plan
    from nemotron_steps.runs.context import Listener, Record
    from nemotron_steps.runs.execute import RunResult

Display = Callable[["Plan"], AbstractContextManager["Listener | None"]]
"""Shows a plan, and within the context what the run records."""

_NO_GPUS = re.compile(r"cluster\.gpus_per_node|.*backend=vllm")
"""Where an error is, that another config may mend on a machine without GPUs."""


def run_here(
    session: Session,
    request: RunRequest,
    *,
    force: bool = False,
    resume: str | None = None,
    accept: Sequence[str] = (),
    display: Display = lambda plan: nullcontext(None),
    ends_process: bool = True,
) -> tuple[RunResult, Plan]:
    """Plan a request and run it in this process; see `plan_run`, and `execute` for `ends_process`.

    StepsError: the plan's errors, or the first step's that failed, with how to look closer and to go on.
    """
    from nemotron_steps.runs.execute import execute

    bound_spinning()
    plan = plan_run(session, request, force=force, resume=resume, accept=accept)
    journal = _Journal(session.store.backend.url)
    with display(plan) as shown:
        try:
            check(session, plan)
            result = execute(
                plan,
                session.store,
                types=session.registry.types,
                force=force,
                resume=resume,
                listeners=[journal] if shown is None else [journal, shown],
                request=request.taking(plan.taken).to_dict(),
                mirrored=session.mirrors(),
                ends_process=ends_process,
                takes_over=not session.in_job,
            )
        except StepsError as error:
            error.hints += tuple(journal.hints(error))
            raise
        except Exception as error:
            error.log_path = journal.run and f"`steps logs {journal.run}`"  # type: ignore[attr-defined]
            raise
    return result, plan


def plan_run(
    session: Session,
    request: RunRequest,
    *,
    force: bool = False,
    resume: str | None = None,
    accept: Sequence[str] = (),
    allow_unfilled: bool = False,
) -> Plan:
    """The plan of a request, with what is already there looked up; a home that does not exist yet holds nothing.

    Args:
        force: the steps asked for run whatever is there, so what reads their outputs cannot be known to be cached.
        resume: a run that is continued: so do the steps that it was forced to make and has not made.
        accept: steps whose earlier result is taken though their code changed.
        allow_unfilled: what is not given, or what an earlier stage did not leave, is the plan's `unfilled`, no error.
    """
    from nemotron_steps.resolver.plan import Changes, StepOutput
    from nemotron_steps.runs.cache import with_cached
    from nemotron_steps.runs.run_folder import get_run
    from nemotron_steps.session.resume_from_stage import without_absent

    looked_up = with_cached(session.plan(request, allow_unfilled=allow_unfilled), session.store, accept=accept)
    plan = without_absent(looked_up, allow_unfilled=allow_unfilled)
    if plan is not looked_up:
        plan = with_cached(plan, session.store)
    forced = set(plan.goals) if force else set(get_run(session.store, resume).forced) if resume else set()
    if not forced:
        return plan
    run: set[str] = set()
    steps = []
    for step in plan.steps:
        reads = {source.step_key for source in step.inputs.values() if isinstance(source, StepOutput)}
        if step.key in forced or step.cached is None or reads & run:
            run.add(step.key)
            anew = Changes((f"reads what {min(reads & run)} makes" if reads & run else "--force",))
            step = replace(step, cached=None, changes=anew if step.cached is not None else step.changes)
        steps.append(step)
    return replace(plan, steps=tuple(steps))


def check(session: Session, plan: Plan) -> None:
    """PlanError for what a step that is still to run would refuse when it starts."""
    from nemotron_steps.runs import prerequisites

    try:
        prerequisites.refuse_unimplemented(plan)
        prerequisites.refuse_unimportable(plan)
        prerequisites.refuse_unready(plan, session.store, session.registry.types)
    except PlanError as error:
        has_gpus = prerequisites.gpus().state == prerequisites.OK
        for problem in error.problems:
            if isinstance(problem, UnsupportedError) and _NO_GPUS.match(problem.where or ""):
                found = tuple(_on_cpu(plan))
                problem.hints = (*problem.hints, *found) if has_gpus else (*found, *problem.hints)
        raise


def _on_cpu(plan: Plan) -> Iterator[str]:
    """What has the step asked for run without GPUs."""
    step = plan.step(plan.goals[0])
    if len(plan.goals) > 1 or step.step_id != step.key:  # `-c` of several steps, or of a pipeline, means other things
        return
    if any(re.match(r"\+*cluster\.|.*backend=vllm", override) for override in step.overrides):  # goes before any config
        return
    if "cpu" in step.manifest.config_names:
        yield "-c cpu   # the step's config for a machine without GPUs"
    else:
        yield "cluster.backend=process cluster.gpus_per_node=0   # one process, on CPU"
    if "tiny" in step.manifest.config_names:
        yield "-c tiny   # for two CPU cores"


class _Journal:
    """Remembers which run this is and whether it did something, for the hints of errors."""

    def __init__(self, home: str) -> None:
        self._home = home
        self.run: str | None = None
        self._did_something = False
        """Whether a step ended or reported numbers: there may be artifacts or checkpoints to go on from."""

    def __call__(self, record: Record) -> None:
        if record["kind"] == "run_started":
            self.run = record["run"]
            announce(record["run"], self._home)
        elif record["kind"] in ("step_finished", "metrics"):
            self._did_something = True

    def hints(self, error: StepsError) -> Iterator[str]:
        """How to look closer and to go on, unless the error says so itself."""
        if self.run is None:
            return
        wanted = [f"steps logs {self.run}"]
        if self._did_something or isinstance(error, RetryableError | InterruptedRunError):
            wanted.append(f"steps run --resume {self.run}")
        yield from (hint for hint in wanted if not any(hint in known for known in error.hints))


def request_of_run(
    session: Session, run: str, *, profile: str | None = None, ignore_checks: Sequence[str] = ()
) -> RunRequest:
    """What an earlier run was asked for, with more checks ignored and under another profile if one is given.
    RequestError where it does not say, or was given a secret."""
    from nemotron_steps.runs.run_folder import get_run

    info = get_run(session.store, run)
    named = (f"steps run STEP -c CONFIG --resume {info.id}",)
    if not info.request:
        raise RequestError(f"run '{info.id}' does not say what it was asked for", hints=named)
    try:
        request = RunRequest.from_dict(info.request)
    except ValueError as error:
        raise RequestError(
            f"what run '{info.id}' was asked for cannot be read",
            where="run.json field request",
            found=str(error),
            hints=named,
        ) from error
    again = replace(request, profile=profile or request.profile, ignore_checks=(*request.ignore_checks, *ignore_checks))
    if MASK in request.command:
        raise RequestError(
            f"run '{info.id}' was given a secret, which is not kept",
            found=request.command,
            hints=(f"steps run --resume {info.id} {again.typed}   # with the secret again",),
        )
    return again
