"""`steps plan` and `steps run`: the request and the profile from the command line, and how a run that is over looks."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, redirect_stdout, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from nemotron_steps.cli.errors import error_fields, print_json
from nemotron_steps.cli.parser import request_of
from nemotron_steps.cli.plans import plan_fields, show_needs, show_plan, show_unfilled
from nemotron_steps.cli.terminal import Terminal, duration, number
from nemotron_steps.config.families import FAMILIES
from nemotron_steps.config.secrets import redact, redact_text
from nemotron_steps.errors import RequestError
from nemotron_steps.runs.log_format import columns_of, compared, is_change, is_table, values_of
from nemotron_steps.runs.report.seed_stats import MEANING, as_text
from nemotron_steps.session.jobs import printable, shown_path
from nemotron_steps.session.run import plan_run, request_of_run, run_here
from nemotron_steps.session.run_request import RunRequest, UsageError
from nemotron_steps.session.session import AUTO, Session
from nemotron_steps.session.submit import checked_launch, follow_attached, inside_job, job_size, submit

if TYPE_CHECKING:
    import argparse

    from nemotron_steps.artifacts.models import Artifact
    from nemotron_steps.config.profiles import Profile
    from nemotron_steps.resolver.plan import Plan
    from nemotron_steps.runs.context import Listener, Record
    from nemotron_steps.runs.execute import RunResult
    from nemotron_steps.runs.run_folder import RunInfo

_MANY_GPU_HOURS = 100
"""Above which a submission asks first."""
_MODELS = ("checkpoint_hf", "reward_model_hf", "checkpoint_megatron", "adapter")
"""Of these, the first two are served as they are."""
_COLORS = {"good": "green", "bad": "red", "same": "dim"}


def plan(args: argparse.Namespace) -> int:
    """`steps plan`."""
    session = Session(args.home)
    request = _settled(session, request_of(args))
    profile = session.profile_of(request)
    if profile is not None:
        os.environ.update(profile.variables_here)
    _refuse_accept(args, forgets=args.force)
    found = plan_run(session, request, force=args.force, accept=args.accept)
    size = job_size(session, request, found, session.job_profile(request, found))
    if args.as_json:
        return print_json({**plan_fields(found), "job": size})
    show_plan(found, request, Terminal.of(), why=args.why)
    show_needs(found, request, Terminal.of(), size["text"])
    return 0


def run(args: argparse.Namespace) -> int:
    """`steps run`."""
    if args.run is not None and args.batch is not None:
        raise UsageError(
            "-r runs attached and -b detached: give one of them",
            where=f"-r {args.run} -b {args.batch}",
            hints=(f"-r {args.run}", f"-b {args.batch}"),
        )
    session = Session(args.home, in_job=inside_job(args.resume))
    request = _settled(session, _request(args, session), args.resume)
    profile = session.profile_of(request, allow_unfilled=args.dry_run)
    if args.force_squash and profile is None:
        raise UsageError("--force-squash rebuilds the container of a profile", hints=("add -r PROFILE or -b PROFILE",))
    if args.force_squash and profile is not None and profile.on_this_machine:
        raise UsageError("--force-squash has nothing to rebuild: executor 'local' uses no container")
    if profile is not None:
        os.environ.update(profile.variables_here)
    _refuse_accept(args, forgets=args.dry_run or args.force)
    if args.dry_run:
        return _dry_run(args, session, request)
    if profile is not None and not (profile.runs_here and args.batch is None):
        return _submit(args, session, request, profile)
    out = None if args.as_json else Terminal.of()
    with stdout_to_stderr() if args.as_json else nullcontext():
        result, found = run_here(
            session,
            request,
            force=args.force,
            resume=args.resume,
            accept=args.accept,
            display=partial(shown, request, out),
        )
    if out is None:
        return print_json(result_fields(result))
    show_result(result, found, out)
    return 0


def _settled(session: Session, asked: RunRequest, resume: str | None = None) -> RunRequest:
    request = session.settled(asked, resume)
    if asked.config == AUTO and request.config is not None:
        out = Terminal.of(sys.stderr)
        out.print(out.style(f"-c auto is -c {request.config} here", "dim"))
    return request


def _request(args: argparse.Namespace, session: Session) -> RunRequest:
    """The request as typed, or, for `--resume RUN` alone, as that run was asked for."""
    if args.words or not args.resume:
        return request_of(args)
    profile = args.run or args.batch
    request = request_of_run(session, args.resume, profile=profile, ignore_checks=args.ignore_checks)
    if args.config or args.input or args.first or args.until or args.over or args.run_name:
        raise UsageError("--resume RUN alone goes on with what that run was asked for; name the steps to change it")
    return request


def _refuse_accept(args: argparse.Namespace, *, forgets: bool) -> None:
    if args.accept and forgets:
        raise UsageError(
            "--accept records that a result is taken: --dry-run records nothing, and --force makes it anew",
            where=f"--accept {args.accept[0]}",
            hints=("leave out --accept, or --dry-run and --force; `steps plan` shows what --accept would take",),
        )


def _dry_run(args: argparse.Namespace, session: Session, request: RunRequest) -> int:
    import yaml

    from nemotron_steps.config.profiles import NoImageError

    found = plan_run(session, request, force=args.force, resume=args.resume, allow_unfilled=True)
    try:
        profile = session.job_profile(request, found)
    except NoImageError as lacking:
        profile, found = lacking.profile, replace(found, unfilled=(*found.unfilled, lacking))
    else:
        try:
            if profile is not None:
                checked_launch(session, request, found, profile, "RUN", force_squash=args.force_squash)
        except RequestError as refused:
            found = replace(found, unfilled=(*found.unfilled, refused))
    size = job_size(session, request, found, profile)
    configs = {step.key: redact(dict(step.config)) for step in found.steps}
    if args.as_json:
        fields = plan_fields(found)
        fields |= {"configs": configs, "job": size}
        fields["unfilled"] = [error_fields(problem) for problem in found.unfilled]
        fields["profile"] = None if profile is None else {"name": request.profile, **profile.shown()}
        return print_json(fields)
    out = Terminal.of()
    shown = {f"{key}, config {found.step(key).config_name or 'default'}": configs[key] for key in found.goals}
    if profile is not None:
        shown[f"profile {request.profile}"] = profile.shown()
    dumper: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    for title, values in shown.items():
        out.print(out.style(f"# {title}", "dim"))
        out.print(yaml.dump(values, Dumper=dumper, sort_keys=False, allow_unicode=True, width=110))
    show_plan(found, request, out)
    show_needs(found, request, out, size["text"])
    show_unfilled(found, out)
    return 0


def _submit(args: argparse.Namespace, session: Session, request: RunRequest, profile: Profile) -> int:
    out = Terminal.of()
    attached, as_json = args.batch is None, args.as_json
    info, profile = submit(
        session,
        request,
        profile,
        force=args.force,
        resume=args.resume,
        attached=attached,
        force_squash=args.force_squash,
        accept=args.accept,
        show=(lambda *_: None) if as_json else partial(show_to_submit, session, request, out, asks=not args.yes),
    )
    if not as_json:
        show_job(info, profile, out)
    if attached:
        info = follow_attached(session.store, info, (lambda text: None) if as_json else write_log)
    if as_json:
        job = {"run": info.id, "executor": info.executor, "job": info.job}
        return print_json(info.to_dict() if attached else job)
    out.print()
    for command in ("status {}", "report {}") if attached else ("logs {} -f", "status {}", "cancel {}"):
        out.print(f"  {out.style('steps ' + command.format(info.id), 'cyan')}")
    return 0


def show_to_submit(
    session: Session, request: RunRequest, out: Terminal, found: Plan, profile: Profile, *, asks: bool = False
) -> None:
    """A plan that is about to be handed over. `asks`: whether to, on a terminal, where it takes many GPU-hours."""
    size = job_size(session, request, found, profile)
    show_plan(found, request, out)
    show_needs(found, request, out, size["text"])
    out.print()
    if asks and (size["gpu_hours"] or 0) > _MANY_GPU_HOURS:
        out.confirm("submit?", "nothing was submitted")


def show_job(info: RunInfo, profile: Profile, out: Terminal) -> None:
    """The job that a run became."""
    gpus = f", GPUs per node: {profile.gpus_per_node}" if profile.gpus_per_node else ""
    image = getattr(profile, "container_image", None)
    size = f"{profile.nodes} node{'s' if profile.nodes > 1 else ''}{gpus}{f', image {image}' if image else ''}"
    job = f"{info.executor} job {info.job}: {size}"
    out.print(f"submitted as {out.style(info.id, 'bold')} ({printable(job)})")


def write_log(text: str) -> None:
    """A part of a job's log, to stdout, without what would steer the terminal."""
    sys.stdout.write("".join(printable(line) + "\n" for line in text.splitlines()))
    sys.stdout.flush()


@contextmanager
def shown(request: RunRequest, out: Terminal | None, found: Plan) -> Iterator[Listener | None]:
    """The plan, then the progress of its run; None shows nothing."""
    if out is None:
        yield None
        return
    from nemotron_steps.cli.watch import LineDisplay

    show_plan(found, request, out)
    out.print()
    display = LineDisplay(out)

    def say(record: Record) -> None:
        with suppress(OSError):  # a terminal that is gone, a full disk: the run goes on
            display(record)

    yield say


@contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Send what steps and their libraries print to stderr, at the file descriptor, so that `--json` stays JSON."""
    sys.stdout.flush()
    try:
        own = sys.stdout.fileno()
    except (OSError, ValueError):  # a stream without a descriptor, as in tests
        with redirect_stdout(sys.stderr):
            yield
        return
    kept = os.dup(own)
    try:
        os.dup2(sys.stderr.fileno(), own)
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, own)
        os.close(kept)


def result_fields(result: RunResult) -> dict[str, Any]:
    """A finished run as JSON fields."""
    steps = []
    for step in result.steps:
        made = step.outputs.items()
        outputs = {port: {"ref": each.ref, "type": each.type, "path": str(each.path)} for port, each in made}
        fields = {"key": step.key, "step": step.step_id, "state": step.state, "seconds": step.seconds}
        hints = [hint.to_dict() for hint in step.hints]
        steps.append({**fields, "outputs": outputs, "summary": dict(step.summary), "hints": hints})
    return {
        "run": result.id,
        "folder": str(result.folder),
        "report": str(result.folder / "report.html"),
        "seconds": result.seconds,
        "fan_out": {
            title: {row: {name: cell.to_dict() for name, cell in cells.items()} for row, cells in table.items()}
            for title, table in result.spreads.items()
        },
        "steps": steps,
    }


def show_result(result: RunResult, plan: Plan, out: Terminal) -> None:
    """Print the end of a run."""
    ran = sum(step.state == "ran" for step in result.steps)
    cached = len(result.steps) - ran
    if result.nothing_ran:
        text = f"nothing to do: all {len(result.steps)} steps are cached" if cached > 1 else "nothing to do: cached"
        head = f"{text}  ({duration(result.seconds)})"
    else:
        counts = f"{ran} ran" + (f", {cached} cached" if cached else "")
        head = f"done in {duration(result.seconds)}  ({counts})"
        out.print()
    out.print(f"{out.style('✓', 'green', 'bold')} {out.style(head, 'bold')}")
    goals = [result.step(key) for key in plan.goals]
    others = [step for step in result.steps if step.state == "ran" and step.key not in plan.goals]
    for step in [*others, *goals]:
        if step.summary:
            out.print(f"\n  {out.style(step.key, 'bold')}")
            show_values(step.summary, out)
    for title, table in result.spreads.items():  # of a fan-out: mean ± spread over seeds
        cells = as_text(table)
        columns = columns_of(cells)
        rows = [[row, *(each.get(column, "") for column in columns)] for row, each in cells.items()]
        titles = [out.style(printable(text).replace("_", " "), "dim") for text in ("", *columns)]
        out.print(f"\n  {out.style(printable(title), 'bold')}  {out.style(MEANING, 'dim')}")
        out.table([titles, *([printable(cell) for cell in row] for row in rows)], indent=4, flexible=0)
    hints = [hint for step in result.steps for hint in step.hints]
    if hints:
        out.print()
    for hint in hints:
        out.print(f"  {out.style('▲ ' + printable(hint.because), 'yellow')}")
        out.wrap(printable(hint.advice), indent=4)
        if hint.overrides:
            out.print(f"    {out.style(' '.join(hint.overrides), 'cyan')}")
    made = [(port, artifact) for step in goals for port, artifact in step.outputs.items()]
    width = max(len(port) for port in ("run's report", *dict(made)))  # an evaluation makes a `report` of its own
    out.print()
    for port, artifact in made:
        out.print(f"  {out.style(port.ljust(width), 'dim')}  {artifact.ref}")
        out.print(f"  {' ' * width}  {out.style(shown_path(artifact.path), 'dim')}")
    report = result.folder / "report.html"
    places = {"run's report": shown_path(report)} if report.is_file() else {}
    for label, place in {**places, "run": result.id}.items():
        out.print(f"  {out.style(label.ljust(width), 'dim')}  {place}")
    if goals[-1].outputs:
        out.print(f"\n  {out.style('next', 'dim')}")
    for artifact in goals[-1].outputs.values():
        for command in _next(artifact, plan):
            out.print(f"    {out.style(printable(redact_text(command)), 'cyan')}")


def _next(artifact: Artifact, plan: Plan) -> Iterator[str]:
    """What one may do with what the last step made."""
    lineage = f"steps artifacts lineage {artifact.ref}"
    if artifact.type not in _MODELS:
        yield from (lineage, f"steps list --consumes {artifact.type}")
        return
    step = next((each for each in plan.steps if each.key == plan.goals[-1]), None)
    source = step.inputs.get("prompts") if step else None
    importer = next((s for s in plan.steps if s.inserted and s.key == getattr(source, "step_key", None)), None)
    rows = getattr(next(iter(importer.inputs.values())) if importer else source, "ref", None)
    rewards = [each for each in step.overrides if each.startswith("reward=")] if step else []
    if rewards and rows:
        words = ["--input", f"model={artifact.ref}", "--input", f"prompts={rows}", *rewards]
        yield f"steps run eval {shlex.join(words)}"
    yield f"steps artifacts export {artifact.ref} DIR --hf"
    if artifact.attributes.get("model_type") in FAMILIES:
        yield f"vllm serve {shlex.quote(shown_path(artifact.path)) if artifact.type in _MODELS[:2] else 'DIR'}"
    yield lineage


def show_values(values: Mapping[str, Any], out: Terminal) -> None:
    """A step's summary: its tables each below the rest."""
    out.table(summary_rows({name: value for name, value in values.items() if not is_table(value)}, out), indent=4)
    for name, table in values.items():
        if is_table(table):
            columns = columns_of(table)
            head = [f"{name.replace('_', ' ')}", *columns]
            body = [[row, *(number(cells[c]) if c in cells else "" for c in columns)] for row, cells in table.items()]
            out.table([[out.style(printable(text), "dim") for text in head], *body], indent=4, flexible=0)


def summary_rows(values: Mapping[str, Any], out: Terminal) -> list[list[str]]:
    """One row per value of a summary: name, value or before → after, and the change."""
    rows = []
    for name, value in values.items():
        label = out.style(printable(str(name)).replace("_", " "), "dim")
        if is_change(value):
            difference, verdict = compared(str(name), value)
            row = [label, f"{number(value['before'])} → {out.style(number(value['after']), 'bold')}"]
            if difference:
                row.append(out.style(difference, _COLORS[verdict]) if verdict else difference)
            rows.append(row)
        elif isinstance(value, Mapping | list | tuple):
            rows.append([label, printable(values_of(value))])
        else:
            rows.append([label, printable(number(value))])
    return rows
