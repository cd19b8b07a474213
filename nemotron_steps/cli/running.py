"""`steps run`: plan, show the plan, run it with progress, say what came out."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from nemotron_steps.cli.errors import print_json
from nemotron_steps.cli.parser import request_of
from nemotron_steps.cli.planning import dry_run, refuse_accept, show_plan, with_cached
from nemotron_steps.cli.terminal import Terminal
from nemotron_steps.config.secrets import MASK
from nemotron_steps.engine.kernels.spinning import bound_spinning
from nemotron_steps.errors import (
    InterruptedRunError,
    PlanError,
    RequestError,
    RetryableError,
    StepsError,
    UnsupportedError,
)
from nemotron_steps.session.run_request import RunRequest, UsageError
from nemotron_steps.session.session import Session
from nemotron_steps.session.supervise import announce

if TYPE_CHECKING:
    import argparse

    from nemotron_steps.resolver.plan import Plan
    from nemotron_steps.runs.context import Listener, Record
    from nemotron_steps.runs.execute import RunResult


_NO_GPUS = re.compile(r"cluster\.gpus_per_node|.*backend=vllm")
"""Where an error is, that another config may mend on a machine without GPUs."""


def run(arguments: argparse.Namespace) -> int:
    """`steps run`."""
    from nemotron_steps.cli.launching import inside_job, launch

    if arguments.run is not None and arguments.batch is not None:
        raise UsageError(
            "-r runs attached and -b detached: give one of them",
            where=f"-r {arguments.run} -b {arguments.batch}",
            hints=(f"-r {arguments.run}", f"-b {arguments.batch}"),
        )
    in_job = inside_job(arguments.resume)
    bench = Session(arguments.home, in_job=in_job)
    if arguments.prog != "steps":
        from nemotron_steps.cli.recipes import respelled

        flag = f"--run {arguments.run}" if arguments.run else f"--batch {arguments.batch}" if arguments.batch else ""
        bench.respell = partial(respelled, prog=arguments.prog, flags=flag)
    asked = bench.settled(_asked(arguments, bench))
    profile = bench.profile_of(asked, allow_unfilled=arguments.dry_run)
    if arguments.force_squash and profile is None:
        raise UsageError("--force-squash rebuilds the container of a profile", hints=("add -r PROFILE or -b PROFILE",))
    if arguments.force_squash and profile is not None and profile.executor == "local":
        raise UsageError("--force-squash has nothing to rebuild: executor 'local' uses no container")
    if profile is not None:
        os.environ.update(profile.variables_here)
    refuse_accept(arguments, asked, forgets=arguments.dry_run or arguments.force)
    if arguments.dry_run:
        return dry_run(arguments, bench, asked)
    if profile is not None and not (profile.runs_here and arguments.batch is None):
        return launch(arguments, bench, asked, profile)
    return _attached(arguments, bench, asked)


def _attached(arguments: argparse.Namespace, bench: Session, asked: RunRequest) -> int:
    terminal = None if arguments.as_json else Terminal.of()
    with stdout_to_stderr() if arguments.as_json else nullcontext():
        result, plan = run_here(
            bench, asked, force=arguments.force, resume=arguments.resume, terminal=terminal, accept=arguments.accept
        )
    if terminal is None:
        print_json(result_fields(result))
    else:
        from nemotron_steps.cli.summary import show_result

        show_result(result, plan, bench.registry, terminal)
    return 0


def run_here(
    bench: Session,
    asked: RunRequest,
    *,
    force: bool = False,
    resume: str | None = None,
    terminal: Terminal | None = None,
    ends_process: bool = True,
    accept: Sequence[str] = (),
) -> tuple[RunResult, Plan]:
    """Plan a request and run it in this process.

    Args:
        force: see `execute`, as `resume` and `ends_process`.
        terminal: where the plan and the progress are shown; None shows nothing.
        accept: see `with_cached`.

    Raises:
        StepsError: the plan's errors, or the first step's that failed, with how to look closer and to go on.
    """
    bound_spinning()
    plan = with_cached(bench, bench.plan(asked), force=force, resume=resume, accept=accept)
    if terminal is not None:
        show_plan(plan, terminal, asked)
        terminal.print()
    seen = _RunSeen(bench.store.backend.url)
    listeners: list[Listener] = [seen]
    display = None
    if terminal is not None:
        from nemotron_steps.cli.live import Tolerant, open_display

        display = Tolerant(open_display(terminal, plan))
        listeners.append(display)
    try:
        return _execute(bench, asked, plan, listeners, force, resume, ends_process), plan
    except StepsError as error:
        seen.add_hints(error)
        raise
    except Exception as error:
        error.log_path = seen.log  # type: ignore[attr-defined]
        raise
    finally:
        if display is not None:
            display.close()


def _execute(
    bench: Session,
    asked: RunRequest,
    plan: Plan,
    listeners: Sequence[Listener],
    force: bool,
    resume: str | None,
    ends_process: bool,
) -> RunResult:
    from nemotron_steps.runs import prerequisites
    from nemotron_steps.runs.execute import execute

    try:
        _refuse(bench, plan)
    except PlanError as error:
        has_gpus = prerequisites.gpus().state == prerequisites.OK
        for problem in error.problems:
            if isinstance(problem, UnsupportedError) and _NO_GPUS.match(problem.where or ""):
                found = tuple(_on_cpu(bench, plan))
                problem.hints = (*problem.hints, *found) if has_gpus else (*found, *problem.hints)
        raise
    return execute(
        plan,
        bench.store,
        types=bench.registry.types,
        force=force,
        resume=resume,
        listeners=listeners,
        request=asked.taking(plan.taken).to_dict(),
        mirrored=bench.mirrors(),
        ends_process=ends_process,
        takes_over=not bench.in_job,
    )


def _refuse(bench: Session, plan: Plan) -> None:
    """PlanError for what a step that is still to run would refuse when it starts."""
    from nemotron_steps.runs import prerequisites

    prerequisites.refuse_unimplemented(plan)
    prerequisites.refuse_unimportable(plan)
    prerequisites.refuse_unready(plan, bench.store, bench.registry.types)


def _on_cpu(bench: Session, plan: Plan) -> Iterator[str]:
    """What has a step run without GPUs, tried: under the same overrides, nothing of the plan is refused."""
    (key, *others) = plan.goals
    planned = plan.step(key)
    if others or planned.step_id != key:  # `-c` of several steps, or of a pipeline, means other things
        return
    process = ("cluster.backend=process", "cluster.gpus_per_node=0")
    for name, more, says in (
        ("cpu", (), "-c cpu   # the step's config for a machine without GPUs"),
        (planned.config_name, process, f"{' '.join(process)}   # one process, on CPU"),
        ("tiny", (), "-c tiny   # for two CPU cores"),
    ):
        if name not in planned.manifest.config_names:
            continue
        try:
            config = bench.compose(planned.step_id, name, (*planned.overrides, *more))
            other = replace(planned, config_name=name, config=config.values)
            _refuse(bench, replace(plan, steps=tuple(other if step is planned else step for step in plan.steps)))
        except StepsError:
            continue
        yield says


@contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Send what steps and their libraries print to stderr, at the file descriptor, so that `--json` stays JSON."""
    sys.stdout.flush()
    try:
        own = sys.stdout.fileno()
    except (OSError, ValueError):  # a stream without a descriptor, as in tests
        own = -1
    kept = os.dup(own) if own >= 0 else -1
    try:
        if own >= 0:
            os.dup2(sys.stderr.fileno(), own)
        with redirect_stdout(sys.stderr):
            yield
    finally:
        if own >= 0:
            os.dup2(kept, own)
            os.close(kept)


class _RunSeen:
    """Remembers where the run's log is, for errors that are nobody's fault but this program's, and what it did."""

    def __init__(self, home: str) -> None:
        self._home = home
        self.log: str | None = None
        self.run: str | None = None
        self.did_something = False
        """Whether a step ended or reported numbers: there may be artifacts or checkpoints to go on from."""

    def __call__(self, record: Record) -> None:
        if record["kind"] == "run_started":
            self.run = record["run"]
            self.log = f"`steps logs {record['run']}`"
            announce(record["run"], self._home)
        elif record["kind"] in ("step_finished", "metrics"):
            self.did_something = True

    def add_hints(self, error: StepsError) -> None:
        """How to look closer and to go on, unless the error says so itself."""
        if self.run is None:
            return
        wanted = [f"steps logs {self.run}"]
        if self.did_something or isinstance(error, RetryableError | InterruptedRunError):
            wanted.append(f"steps run --resume {self.run}")
        error.hints += tuple(hint for hint in wanted if not any(hint in known for known in error.hints))


def result_fields(result: RunResult) -> dict[str, Any]:
    """A finished run as JSON fields."""
    return {
        "run": result.id,
        "folder": str(result.folder),
        "report": str(result.folder / "report.html"),
        "seconds": result.seconds,
        "fan_out": {
            title: {row: {name: cell.to_dict() for name, cell in cells.items()} for row, cells in table.items()}
            for title, table in result.spreads.items()
        },
        "steps": [
            {
                "key": step.key,
                "step": step.step_id,
                "state": step.state,
                "seconds": step.seconds,
                "outputs": {
                    port: {"ref": artifact.ref, "type": artifact.type, "path": str(artifact.path)}
                    for port, artifact in step.outputs.items()
                },
                "summary": dict(step.summary),
                "hints": [hint.to_dict() for hint in step.hints],
            }
            for step in result.steps
        ],
    }


def _asked(arguments: argparse.Namespace, bench: Session) -> RunRequest:
    """The request as typed, or, for `--resume RUN` alone, as that run was asked for."""
    if arguments.words or not arguments.resume:
        return request_of(arguments)
    profile = arguments.run or arguments.batch
    asked = asked_before(bench, arguments.resume, profile=profile, ignore_checks=arguments.ignore_checks)
    if arguments.config or arguments.input or arguments.first or arguments.until or arguments.over:
        raise UsageError("--resume RUN alone goes on with what that run was asked for; name the steps to change it")
    return asked


def asked_before(
    bench: Session, run: str, *, profile: str | None = None, ignore_checks: Sequence[str] = ()
) -> RunRequest:
    """What an earlier run was asked for. RequestError where it does not say, or was given a secret.

    Args:
        profile: to go on under; None for the one it had.
        ignore_checks: stages whose checks are ignored from now on.
    """
    from nemotron_steps.runs.run_folder import get_run

    info = get_run(bench.store, run)
    if not info.request:
        raise RequestError(
            f"run '{info.id}' does not say what it was asked for",
            hints=(f"steps run STEP -c CONFIG --resume {info.id}",),
        )
    try:
        asked = RunRequest.from_dict(info.request)
    except ValueError as error:
        raise RequestError(
            f"what run '{info.id}' was asked for cannot be read",
            where="run.json field request",
            found=str(error),
            hints=(f"steps run STEP -c CONFIG --resume {info.id}",),
        ) from error
    again = replace(asked, profile=profile or asked.profile, ignore_checks=(*asked.ignore_checks, *ignore_checks))
    if MASK in asked.command:
        raise RequestError(
            f"run '{info.id}' was given a secret, which is not kept",
            found=asked.command,
            hints=(f"steps run --resume {info.id} {again.typed}   # with the secret again",),
        )
    return again
