"""`steps plan` and `steps run`: the request and the profile from the command line, and how a run that is over looks."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, redirect_stdout, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from nemotron_steps.cli.errors import print_json
from nemotron_steps.cli.parser import request_of
from nemotron_steps.cli.plans import plan_fields, show_needs, show_plan, show_unfilled
from nemotron_steps.cli.terminal import Terminal, duration, number
from nemotron_steps.config.secrets import redact
from nemotron_steps.errors import RequestError
from nemotron_steps.runs.log_format import columns_of, compared, is_change, is_table, values_of
from nemotron_steps.runs.report.seed_stats import MEANING, as_text
from nemotron_steps.session.jobs import printable, shown_path
from nemotron_steps.session.run import plan_run, request_of_run, run_here
from nemotron_steps.session.run_request import RunRequest, UsageError
from nemotron_steps.session.session import Session
from nemotron_steps.session.submit import checked_launch, follow_attached, inside_job, submit

if TYPE_CHECKING:
    import argparse

    from nemotron_steps.config.profiles import Profile
    from nemotron_steps.manifest.registry import Registry
    from nemotron_steps.resolver.plan import Plan
    from nemotron_steps.runs.context import Listener, Record
    from nemotron_steps.runs.execute import RunResult, StepResult
    from nemotron_steps.runs.report.seed_stats import Table
    from nemotron_steps.runs.run_folder import RunInfo

_COLORS = {"good": "green", "bad": "red", "same": "dim"}
"""Of a change."""


def plan(arguments: argparse.Namespace) -> int:
    """`steps plan`."""
    session = Session(arguments.home)
    request = session.settled(request_of(arguments))
    profile = session.profile_of(request)
    if profile is not None:
        os.environ.update(profile.variables_here)
    _refuse_accept(arguments, forgets=arguments.force)
    found = plan_run(session, request, force=arguments.force, accept=arguments.accept)
    session.job_profile(request, found)
    if arguments.as_json:
        print_json(plan_fields(found))
    else:
        show_plan(found, request, Terminal.of(), why=arguments.why)
        show_needs(found, request, Terminal.of())
    return 0


def run(arguments: argparse.Namespace) -> int:
    """`steps run`."""
    if arguments.run is not None and arguments.batch is not None:
        raise UsageError(
            "-r runs attached and -b detached: give one of them",
            where=f"-r {arguments.run} -b {arguments.batch}",
            hints=(f"-r {arguments.run}", f"-b {arguments.batch}"),
        )
    session = Session(arguments.home, in_job=inside_job(arguments.resume))
    if arguments.prog != "steps":
        from nemotron_steps.cli.recipes import respelled

        flag = f"--run {arguments.run}" if arguments.run else f"--batch {arguments.batch}" if arguments.batch else ""
        session.respell = partial(respelled, prog=arguments.prog, flags=flag)
    request = session.settled(_request(arguments, session))
    profile = session.profile_of(request, allow_unfilled=arguments.dry_run)
    if arguments.force_squash and profile is None:
        raise UsageError("--force-squash rebuilds the container of a profile", hints=("add -r PROFILE or -b PROFILE",))
    if arguments.force_squash and profile is not None and profile.on_this_machine:
        raise UsageError("--force-squash has nothing to rebuild: executor 'local' uses no container")
    if profile is not None:
        os.environ.update(profile.variables_here)
    _refuse_accept(arguments, forgets=arguments.dry_run or arguments.force)
    if arguments.dry_run:
        return _dry_run(arguments, session, request)
    if profile is not None and not (profile.runs_here and arguments.batch is None):
        return _submit(arguments, session, request, profile)
    terminal = None if arguments.as_json else Terminal.of()
    with stdout_to_stderr() if arguments.as_json else nullcontext():
        result, found = run_here(
            session,
            request,
            force=arguments.force,
            resume=arguments.resume,
            accept=arguments.accept,
            display=partial(shown, request, terminal),
        )
    if terminal is None:
        print_json(result_fields(result))
    else:
        show_result(result, found, session.registry, terminal)
    return 0


def _request(arguments: argparse.Namespace, session: Session) -> RunRequest:
    """The request as typed, or, for `--resume RUN` alone, as that run was asked for."""
    if arguments.words or not arguments.resume:
        return request_of(arguments)
    profile = arguments.run or arguments.batch
    request = request_of_run(session, arguments.resume, profile=profile, ignore_checks=arguments.ignore_checks)
    if arguments.config or arguments.input or arguments.first or arguments.until or arguments.over:
        raise UsageError("--resume RUN alone goes on with what that run was asked for; name the steps to change it")
    return request


def _refuse_accept(arguments: argparse.Namespace, *, forgets: bool) -> None:
    """UsageError for `--accept` beside what forgets it."""
    if arguments.accept and forgets:
        raise UsageError(
            "--accept records that a result is taken: --dry-run records nothing, and --force makes it anew",
            where=f"--accept {arguments.accept[0]}",
            hints=("leave out --accept, or --dry-run and --force; `steps plan` shows what --accept would take",),
        )


def _dry_run(arguments: argparse.Namespace, session: Session, request: RunRequest) -> int:
    """`steps run --dry-run`: the merged config of every step asked for, the profile, the plan, what it still lacks.

    All of it redacted. Inputs that are not given, or not here, are not a mistake yet.
    """
    from nemotron_steps.config.profiles import NoImageError

    found = plan_run(session, request, force=arguments.force, resume=arguments.resume, allow_unfilled=True)
    try:
        profile = session.job_profile(request, found)
    except NoImageError as lacking:
        profile, found = lacking.profile, replace(found, unfilled=(*found.unfilled, lacking))
    else:
        try:
            if profile is not None:
                checked_launch(session, request, found, profile, "RUN", force_squash=arguments.force_squash)
        except RequestError as refused:
            found = replace(found, unfilled=(*found.unfilled, refused))
    if arguments.as_json:
        fields = plan_fields(found)
        fields["configs"] = {step.key: redact(dict(step.config)) for step in found.steps}
        fields["unfilled"] = [problem.to_dict() for problem in found.unfilled]
        fields["profile"] = None if profile is None else {"name": request.profile, **profile.shown()}
        print_json(fields)
        return 0
    terminal = Terminal.of()
    for key in found.goals:
        step = found.step(key)
        terminal.print(terminal.style(f"# {key}, config {step.config_name or 'default'}", "dim"))
        terminal.print(_yaml_text(redact(dict(step.config))))
    if profile is not None:
        terminal.print(terminal.style(f"# profile {request.profile}", "dim"))
        terminal.print(_yaml_text(profile.shown()))
    show_plan(found, request, terminal)
    show_needs(found, request, terminal)
    show_unfilled(found, terminal)
    return 0


def _yaml_text(values: Any) -> str:
    """Plain values as YAML, in the order they have."""
    import yaml

    dumper: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    text: str = yaml.dump(
        values, Dumper=dumper, sort_keys=False, allow_unicode=True, default_flow_style=False, width=110
    )
    return text


def _submit(arguments: argparse.Namespace, session: Session, request: RunRequest, profile: Profile) -> int:
    """Submit the run; with `-r` follow its log to the end, with `-b` return at once."""
    terminal = Terminal.of()
    attached = arguments.batch is None
    info, profile = submit(
        session,
        request,
        profile,
        force=arguments.force,
        resume=arguments.resume,
        attached=attached,
        force_squash=arguments.force_squash,
        accept=arguments.accept,
        show=(lambda found: None) if arguments.as_json else partial(show_to_submit, request, terminal),
    )
    if not arguments.as_json:
        show_job(info, profile, terminal)
    if attached:
        info = follow_attached(session.store, info, (lambda text: None) if arguments.as_json else write_log)
    if arguments.as_json:
        job = {"run": info.id, "executor": info.executor, "job": info.job}
        print_json(info.to_dict() if attached else job)
        return 0
    terminal.print()
    for command in ("status {}", "report {}") if attached else ("logs {} -f", "status {}", "cancel {}"):
        terminal.print(f"  {terminal.style('steps ' + command.format(info.id), 'cyan')}")
    return 0


def show_to_submit(request: RunRequest, terminal: Terminal, found: Plan) -> None:
    """A plan that is about to be handed over."""
    show_plan(found, request, terminal)
    show_needs(found, request, terminal)
    terminal.print()


def show_job(info: RunInfo, profile: Profile, terminal: Terminal) -> None:
    """The job that a run became."""
    gpus = f", GPUs per node: {profile.gpus_per_node}" if profile.gpus_per_node else ""
    image = getattr(profile, "container_image", None)
    size = f"{profile.nodes} node{'s' if profile.nodes > 1 else ''}{gpus}{f', image {image}' if image else ''}"
    job = f"{info.executor} job {info.job}: {size}"
    terminal.print(f"submitted as {terminal.style(info.id, 'bold')} ({printable(job)})")


def write_log(text: str) -> None:
    """A part of a job's log, to stdout, without what would steer the terminal."""
    sys.stdout.write("".join(printable(line) + "\n" for line in text.splitlines()))
    sys.stdout.flush()


@contextmanager
def shown(request: RunRequest, terminal: Terminal | None, found: Plan) -> Iterator[Listener | None]:
    """The plan, then the progress of its run; None shows nothing."""
    if terminal is None:
        yield None
        return
    from nemotron_steps.cli.watch import open_display

    show_plan(found, request, terminal)
    terminal.print()
    display = open_display(terminal, found)
    is_dark = False

    def draw(record: Record) -> None:
        nonlocal is_dark
        try:
            if not is_dark:
                display(record)
        except OSError:  # a terminal that is gone, a full disk: the run goes on
            is_dark = True

    try:
        yield draw
    finally:
        with suppress(OSError):
            if not is_dark:
                display.close()


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


def show_result(result: RunResult, plan: Plan, registry: Registry, terminal: Terminal) -> None:
    """Print the end of a run."""
    ran = sum(step.state == "ran" for step in result.steps)
    cached = len(result.steps) - ran
    if result.nothing_ran:
        text = f"nothing to do: all {len(result.steps)} steps are cached" if cached > 1 else "nothing to do: cached"
        head = f"{text}  ({duration(result.seconds)})"
    else:
        counts = f"{ran} ran" + (f", {cached} cached" if cached else "")
        head = f"done in {duration(result.seconds)}  ({counts})"
        terminal.print()
    terminal.print(f"{terminal.style('✓', 'green', 'bold')} {terminal.style(head, 'bold')}")
    goals = [result.step(key) for key in plan.goals]
    others = [step for step in result.steps if step.state == "ran" and step.key not in plan.goals]
    for step in [*others, *goals]:
        _show_summary(step, terminal)
    show_spreads(result.spreads, terminal)
    _show_hints(result, terminal)
    _show_places(result, goals, terminal)
    _show_next(result, goals[-1], registry, terminal)


def show_values(values: Mapping[str, Any], terminal: Terminal) -> None:
    """A step's summary: its tables each below the rest."""
    terminal.table(
        summary_rows({name: value for name, value in values.items() if not is_table(value)}, terminal), indent=4
    )
    for name, table in values.items():
        if is_table(table):
            columns = columns_of(table)
            head = [f"{name.replace('_', ' ')}", *columns]
            body = [[row, *(number(cells[c]) if c in cells else "" for c in columns)] for row, cells in table.items()]
            terminal.table([[terminal.style(printable(text), "dim") for text in head], *body], indent=4, flexible=0)


def show_spreads(tables: Mapping[str, Table], terminal: Terminal) -> None:
    """What a fan-out came to: mean ± spread over seeds."""
    for title, table in tables.items():
        shown = as_text(table)
        columns = columns_of(shown)
        rows = [[row, *(cells.get(column, "") for column in columns)] for row, cells in shown.items()]
        head = [terminal.style(printable(text).replace("_", " "), "dim") for text in ("", *columns)]
        terminal.print()
        terminal.print(f"  {terminal.style(printable(title), 'bold')}  {terminal.style(MEANING, 'dim')}")
        terminal.table([head, *([printable(cell) for cell in row] for row in rows)], indent=4, flexible=0)


def summary_rows(values: Mapping[str, Any], terminal: Terminal) -> list[list[str]]:
    """One row per value of a summary: name, value or before → after, and the change."""
    rows = []
    for name, value in values.items():
        label = terminal.style(printable(str(name)).replace("_", " "), "dim")
        if is_change(value):
            difference, verdict = compared(str(name), value)
            row = [label, f"{number(value['before'])} → {terminal.style(number(value['after']), 'bold')}"]
            if difference:
                row.append(terminal.style(difference, _COLORS[verdict]) if verdict else difference)
            rows.append(row)
        elif isinstance(value, Mapping | list | tuple):
            rows.append([label, printable(values_of(value))])
        else:
            rows.append([label, printable(number(value))])
    return rows


def _show_summary(step: StepResult, terminal: Terminal) -> None:
    if not step.summary:
        return
    terminal.print()
    terminal.print(f"  {terminal.style(step.key, 'bold')}")
    show_values(step.summary, terminal)


def _show_hints(result: RunResult, terminal: Terminal) -> None:
    hints = [hint for step in result.steps for hint in step.hints]
    if hints:
        terminal.print()
    for hint in hints:
        terminal.print(f"  {terminal.style('▲ ' + printable(hint.because), 'yellow')}")
        terminal.wrap(printable(hint.advice), indent=4)
        if hint.overrides:
            terminal.print(f"    {terminal.style(' '.join(hint.overrides), 'cyan')}")


def _show_places(result: RunResult, goals: list[StepResult], terminal: Terminal) -> None:
    rows = [(port, artifact.ref, artifact.path) for step in goals for port, artifact in step.outputs.items()]
    label = "run's report"  # an evaluation produces a `report` of its own
    width = max([len(port) for port, _, _ in rows] + [len(label)])
    terminal.print()
    for port, ref, path in rows:
        terminal.print(f"  {terminal.style(port.ljust(width), 'dim')}  {ref}")
        terminal.print(f"  {' ' * width}  {terminal.style(shown_path(path), 'dim')}")
    report = result.folder / "report.html"
    if report.is_file():
        terminal.print(f"  {terminal.style(label.ljust(width), 'dim')}  {shown_path(report)}")
    terminal.print(f"  {terminal.style('run'.ljust(width), 'dim')}  {result.id}")


def _show_next(result: RunResult, last: StepResult, registry: Registry, terminal: Terminal) -> None:
    """At most three commands: evaluations and conversions of what was made, with every input that they need."""
    done = {step.step_id for step in result.steps}
    made = [artifact for step in result.steps for artifact in step.outputs.values()]
    commands = []
    for step_id, manifest in registry.steps.items():
        if step_id in done or manifest.step.entry is None or manifest.step.category not in ("eval", "convert"):
            continue
        fed = {}
        for port in manifest.consumes:
            fitting = [each.ref for each in made if registry.types.is_a(each.type, port.type)]
            if port.required and fitting:
                fed[port.name] = fitting[-1]
        reads_last = {artifact.ref for artifact in last.outputs.values()} & {*fed.values()}
        # A command that would only ask for more inputs is left out.
        if reads_last and all(port.name in fed for port in manifest.consumes if port.required):
            inputs = " ".join(f"--input {name}={ref}" for name, ref in fed.items())
            commands.append(f"steps run {step_id} {inputs}")
    commands = sorted(commands, key=lambda command: not command.startswith("steps run eval"))[:2]
    commands += [f"steps artifacts lineage {artifact.ref}" for artifact in last.outputs.values()]
    if commands:
        terminal.print()
        terminal.print(f"  {terminal.style('next', 'dim')}")
    for command in commands[:3]:
        terminal.print(f"    {terminal.style(command, 'cyan')}")
