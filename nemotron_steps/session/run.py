"""`steps run`, top to bottom: compose and plan, look up what is cached, check, execute, say how to go on.

What works elsewhere is `submit`; what shows a plan or draws progress is handed in.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
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
"""Where an error is, that another config may mend on a machine without GPUs, unless an override is WANTED."""
_WANTED = re.compile(r"\+*cluster\.|.*backend=vllm")


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
            journal.say_how_to_go_on(error)
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

    looked_up = with_cached(session.plan(request, allow_unfilled=allow_unfilled), session.store, accept=accept)
    plan = _without_absent(looked_up, allow_unfilled=allow_unfilled)
    if plan is not looked_up:
        plan = with_cached(plan, session.store)
    forced = set(plan.goals) if force else set(get_run(session.store, resume).forced) if resume else set()
    if not forced:
        return plan
    run: set[str] = set()
    steps = []
    for step in plan.steps:
        reads = {source.step_key for source in step.inputs.values() if isinstance(source, StepOutput)} & run
        if step.key in forced or step.cached is None or reads:
            run.add(step.key)
            anew = Changes((f"reads what {min(reads)} makes" if reads else "--force",))
            step = replace(step, cached=None, changes=anew if step.cached is not None else step.changes)
        steps.append(step)
    return replace(plan, steps=tuple(steps))


def _without_absent(plan: Plan, *, allow_unfilled: bool) -> Plan:
    """With `--from`: the plan without ports of many that only an earlier stage would feed that left nothing here.

    PlanError if a step needs what such a stage would have left; with `allow_unfilled` that is one of the plan's
    `unfilled` instead.
    """
    from nemotron_steps.resolver.plan import StepOutput
    from nemotron_steps.resolver.problems import MissingInput, raise_all

    absent: dict[str, str] = {}  # earlier stages that would have to run, and converters of theirs → the stage
    reads: dict[str, dict[str, str]] = {}
    for step in plan.steps:
        reads[step.key] = {p: s.step_key for p, s in step.inputs.items() if isinstance(s, StepOutput)}
        before = [absent[key] for key in reads[step.key].values() if key in absent]
        if step.cached is None and step.earlier:
            absent[step.key] = step.key if step.instance is None else step.instance.stage
        elif step.cached is None and step.inserted and before:
            absent[step.key] = before[0]
    if not absent:
        return plan
    steps, problems, notes = {}, [], list(plan.warnings)
    for step in plan.steps:
        lacking = [port for port, key in reads[step.key].items() if key in absent and step.key not in absent]
        fed = {port.partition(".")[0] for port in step.inputs if port not in lacking}
        # One of those of a port that takes many, others of which are fed.
        optional = [port for port in lacking if "." in port and port.partition(".")[0] in fed]
        if optional:
            names = ", ".join(optional)
            notes.append(f"{step.key} goes without {names}: nothing here was made by these stages as they are planned")
        for port in lacking:
            if port in optional:
                continue
            key = reads[step.key][port]
            stage, changes = absent[key], plan.step(key).changes
            accept = (f"--accept {key}   # its code alone changed",) if changes is not None and changes.code else ()
            what = f"'{port}' of {step.key} is what {stage} leaves, which is not here as it is planned now"
            hints = (*accept, f"--input {step.key}.{port}=PATH", f"--from {next(iter(absent.values()))}   # makes it")
            problems.append(MissingInput(what, chain=(stage, f"{step.key}.{port}"), hints=hints))
        ports = tuple(port for port in step.manifest.consumes if port.name not in optional)
        inputs = {port: source for port, source in step.inputs.items() if port not in optional}
        manifest = step.manifest.with_ports(ports) if optional else step.manifest
        steps[step.key] = replace(step, manifest=manifest, inputs=inputs)
        reads[step.key] = {port: key for port, key in reads[step.key].items() if port not in optional}
    if not allow_unfilled:
        raise_all(problems, f"cannot plan '{plan.name}'")
    needed = list(plan.goals)
    for key in needed:
        needed += [each for each in reads[key].values() if each not in needed]
    kept = tuple(steps[step.key] for step in plan.steps if step.key in needed)
    return replace(plan, steps=kept, warnings=tuple(notes), unfilled=(*plan.unfilled, *problems))


def check(session: Session, plan: Plan) -> None:
    """PlanError for what a step that is still to run would refuse when it starts."""
    from nemotron_steps.runs import prerequisites

    try:
        prerequisites.refuse_unimplemented(plan)
        prerequisites.refuse_unimportable(plan)
        prerequisites.refuse_unready(plan, session.store, session.registry.types)
    except PlanError as error:
        step = plan.step(plan.goals[0])
        on_cpu = "cluster.backend=process cluster.gpus_per_node=0   # one process, on CPU"
        if "cpu" in step.manifest.config_names:
            on_cpu = "-c cpu   # the step's config for a machine without GPUs"
        has_gpus = prerequisites.gpus().state == prerequisites.OK
        # Of a pipeline `-c` means other things, and overrides go before any config.
        if len(plan.goals) > 1 or step.step_id != step.key or any(map(_WANTED.match, step.overrides)):
            raise
        for problem in error.problems:
            if isinstance(problem, UnsupportedError) and _NO_GPUS.match(problem.where or ""):
                problem.hints = (*problem.hints, on_cpu) if has_gpus else (on_cpu, *problem.hints)
        raise


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

    def say_how_to_go_on(self, error: StepsError) -> None:
        """And how to look closer, unless the error says so itself."""
        if self.run is None:
            return
        wanted = [f"steps logs {self.run}"]
        if self._did_something or isinstance(error, RetryableError | InterruptedRunError):
            wanted.append(f"steps run --resume {self.run}")
        known = "\n".join(error.hints)
        error.hints += tuple(hint for hint in wanted if hint not in known)


def request_of_run(
    session: Session, run: str, *, profile: str | None = None, ignore_checks: Sequence[str] = ()
) -> RunRequest:
    """What an earlier run was asked for, with more checks ignored and under another profile if one is given.
    RequestError where it does not say, or was given a secret."""
    from nemotron_steps.runs.run_folder import get_run

    info = get_run(session.store, run)
    try:
        request = RunRequest.from_dict(info.request)
    except ValueError as error:
        what, hints = f"run '{info.id}' does not say what it was asked for", (f"steps run STEP --resume {info.id}",)
        raise RequestError(what, where="run.json field request", found=str(error), hints=hints) from error
    again = replace(request, profile=profile or request.profile, ignore_checks=(*request.ignore_checks, *ignore_checks))
    if MASK in request.command:
        hints = (f"steps run --resume {info.id} {again.typed}   # with the secret again",)
        raise RequestError(f"run '{info.id}' was given a secret, which is not kept", found=request.command, hints=hints)
    return again
