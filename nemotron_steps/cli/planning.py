"""`steps plan` and `steps run --dry-run`: type-check, show what would run, run nothing."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nemotron_steps.artifacts.models import made_by
from nemotron_steps.cli.errors import print_json, typed
from nemotron_steps.cli.memory import show_memory
from nemotron_steps.cli.parser import request_of
from nemotron_steps.cli.terminal import Terminal, printable
from nemotron_steps.config.secrets import redact, redact_text
from nemotron_steps.errors import RequestError
from nemotron_steps.session.run_request import RunRequest, UsageError
from nemotron_steps.session.session import Session

if TYPE_CHECKING:
    import argparse

    from nemotron_steps.resolver.plan import InputSource, Plan, PlannedStep


def plan(arguments: argparse.Namespace) -> int:
    """`steps plan`."""
    bench = Session(arguments.home)
    asked = bench.settled(request_of(arguments))
    profile = bench.profile_of(asked)
    if profile is not None:
        os.environ.update(profile.variables_here)
    refuse_accept(arguments, asked, forgets=arguments.force)
    found = with_cached(bench, bench.plan(asked), force=arguments.force, accept=arguments.accept)
    bench.job_profile(asked, found)
    if arguments.as_json:
        print_json(plan_fields(found))
    else:
        show_plan(found, Terminal.of(), asked, why=arguments.why)
        show_needs(found, Terminal.of(), asked)
    return 0


def refuse_accept(arguments: argparse.Namespace, asked: RunRequest, *, forgets: bool) -> None:
    """UsageError for `--accept` beside what forgets it."""
    if arguments.accept and forgets:
        raise UsageError(
            "--accept records that a result is taken: --dry-run records nothing, and --force makes it anew",
            where=f"--accept {arguments.accept[0]}",
            hints=("leave out --accept, or --dry-run and --force; `steps plan` shows what --accept would take",),
        )


def dry_run(arguments: argparse.Namespace, bench: Session, asked: RunRequest) -> int:
    """`steps run --dry-run`: the merged config of every step asked for, the profile, the plan, what it still lacks.

    All of it redacted. Inputs that are not given, or not here, are no mistake yet.
    """
    from nemotron_steps.cli.launching import checked_launch
    from nemotron_steps.config.profiles import NoImageError

    found = bench.plan(asked, allow_unfilled=True)
    found = with_cached(bench, found, force=arguments.force, resume=arguments.resume, allow_unfilled=True)
    try:
        profile = bench.job_profile(asked, found)
    except NoImageError as lacking:
        profile, found = lacking.profile, replace(found, unfilled=(*found.unfilled, lacking))
    else:
        try:
            if profile is not None:
                checked_launch(bench, asked, found, profile, "RUN", force_squash=arguments.force_squash)
        except RequestError as refused:
            found = replace(found, unfilled=(*found.unfilled, refused))
    if arguments.as_json:
        fields = plan_fields(found)
        fields["configs"] = {step.key: redact(dict(step.config)) for step in found.steps}
        fields["unfilled"] = [problem.to_dict() for problem in found.unfilled]
        fields["profile"] = None if profile is None else {"name": asked.profile, **profile.shown()}
        print_json(fields)
        return 0
    terminal = Terminal.of()
    for key in found.goals:
        step = found.step(key)
        terminal.print(terminal.style(f"# {key}, config {step.config_name or 'default'}", "dim"))
        terminal.print(yaml_text(redact(dict(step.config))))
    if profile is not None:
        terminal.print(terminal.style(f"# profile {asked.profile}", "dim"))
        terminal.print(yaml_text(profile.shown()))
    show_plan(found, terminal, asked)
    show_needs(found, terminal, asked)
    _show_unfilled(found, terminal)
    return 0


def show_needs(found: Plan, terminal: Terminal, asked: RunRequest) -> None:
    """What the steps still to run need and this machine lacks; under a profile, what was not asked of its machines."""
    from nemotron_steps.runs.prerequisites import missing, needs_of

    if asked.profile is not None:
        needs = dict.fromkeys(need for step in found if step.cached is None for need in needs_of(step))
        if needs:
            text = f"not asked of this machine, but needed where {asked.profile} runs it: {', '.join(needs)}"
            terminal.print(f"  {terminal.style('note:', 'yellow')} {printable(text)}")
        return
    for finding, steps in missing(found, tried=False):
        keys = ", ".join(step.key for step in steps)
        terminal.print(f"  {terminal.style('will need', 'yellow')} {printable(f'{finding.name}, for {keys}')}")
        for line in finding.fix.splitlines()[:1]:
            terminal.print(f"      {terminal.style(printable(line), 'cyan')}")


def _show_unfilled(found: Plan, terminal: Terminal) -> None:
    if not found.unfilled:
        return
    terminal.print()
    terminal.print(terminal.style(f"to be filled in before it can run: {len(found.unfilled)}", "bold"))
    for problem in found.unfilled:
        wanted = f": {problem.expected}" if problem.expected else ""
        terminal.print(f"  {terminal.style('○', 'yellow')} {printable(redact_text(problem.what + wanted))}")
        for hint in problem.hints[:2]:
            terminal.print(f"      {terminal.style(printable(redact_text(hint)), 'cyan')}")


def with_cached(
    bench: Session,
    found: Plan,
    *,
    force: bool = False,
    resume: str | None = None,
    allow_unfilled: bool = False,
    accept: Sequence[str] = (),
) -> Plan:
    """The plan with what is already there filled in; a home that does not exist yet holds nothing.

    Args:
        force: the steps asked for run whatever is there, so what reads their outputs cannot be known to be cached.
        resume: a run that is continued: so do the steps that it was forced to make and has not made.
        allow_unfilled: what an earlier stage did not leave is the plan's `unfilled` instead of an error.
        accept: steps whose earlier result is taken though their code changed (see `runs.cache.with_cached`).
    """
    from nemotron_steps.resolver.plan import Changes, StepOutput
    from nemotron_steps.resolver.resume_from_stage import without_absent
    from nemotron_steps.runs.cache import with_cached as look_up
    from nemotron_steps.runs.run_folder import get_run

    looked_up = look_up(found, bench.store, accept=accept)
    found = without_absent(looked_up, allow_unfilled=allow_unfilled)
    if found is not looked_up:
        found = look_up(found, bench.store)
    forced = set(found.goals) if force else set(get_run(bench.store, resume).forced) if resume else set()
    if not forced:
        return found
    run: set[str] = set()
    steps = []
    for step in found.steps:
        reads = {source.step_key for source in step.inputs.values() if isinstance(source, StepOutput)}
        if step.key in forced or step.cached is None or reads & run:
            run.add(step.key)
            anew = Changes((f"reads what {min(reads & run)} makes" if reads & run else "--force",))
            step = replace(step, cached=None, changes=anew if step.cached is not None else step.changes)
        steps.append(step)
    return replace(found, steps=tuple(steps))


def plan_fields(found: Plan) -> dict[str, Any]:
    """A plan as JSON fields, redacted."""
    fields: dict[str, Any] = redact(found.to_dict())
    for step in fields["steps"]:
        step["overrides"] = [redact_text(text) for text in step["overrides"]]
    return fields


def show_plan(found: Plan, terminal: Terminal, asked: RunRequest, *, why: bool = False) -> None:
    """The plan as a table: what is cached, what runs, where each input comes from, which converters were inserted.

    Args:
        why: with what changed of each step that must run.
    """
    numbers = {step.key: index for index, step in enumerate(found.steps, start=1)}
    cached = sum(step.cached is not None for step in found.steps)
    count = f"{len(found.steps)} step" + ("s" if len(found.steps) != 1 else "")
    state = "all cached" if cached == len(found.steps) else f"{cached} cached" if cached else "nothing cached"
    head = terminal.style(printable(asked.redacted().command), "bold")
    terminal.print(f"{head}  {terminal.style(f'{count}, {state}', 'dim')}")
    has_stages = any(_is_stage(step) for step in found.steps)
    rows = []
    for step in found.steps:
        done = step.cached is not None
        mark = terminal.style("✓", "green") if done else terminal.style("●", "cyan")
        name = terminal.style(step.key, *(["dim"] if done else ["bold"] if step.key in found.goals else []))
        config = terminal.style(step.config_name or "default", "dim")
        row = [mark, terminal.style(str(numbers[step.key]), "dim"), name, config, _note(step, numbers, terminal)]
        if has_stages:
            row.insert(3, terminal.style(step.step_id, "dim") if _is_stage(step) else "")
        rows.append(row)
    terminal.table(rows, indent=2, below=7)
    for warning in found.warnings:
        terminal.print(f"  {terminal.style('note:', 'yellow')} {printable(warning)}")
    by_code = [step.key for step in found.steps if step.changes is not None and step.changes.code]
    if by_code:
        accept = " ".join(f"--accept {shlex.quote(key)}" for key in by_code)
        same = None if typed[0].words[:1] in ((), ("plan",)) else typed[0].with_change(accept, None)
        command = same or typed[0].hint(f"steps run {asked.redacted().typed} {accept}")
        note = terminal.style("note:", "yellow")
        terminal.print(f"  {note} only code changed since; to take what is there as it is:")
        terminal.print(f"    {terminal.style(printable(redact_text(command)), 'cyan')}")
    if why:
        _show_why(found, numbers, terminal)
    show_memory(found, terminal)


def _show_why(found: Plan, numbers: dict[str, int], terminal: Terminal) -> None:
    """What changed of each step that must run against the nearest earlier result of it."""
    for step in found.steps:
        if step.cached is None:
            changes = step.changes
            since = f"since run {changes.run}" if changes is not None and changes.run else ""
            terminal.print(f"  {numbers[step.key]}  {terminal.style(step.key, 'bold')}  {terminal.style(since, 'dim')}")
            for line in changes.differences if changes is not None else ("no earlier result of it is here",):
                terminal.print(f"      {printable(redact_text(line))}")


def yaml_text(values: Any) -> str:
    """Plain values as YAML, in the order they have."""
    import yaml

    dumper: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    text: str = yaml.dump(
        values, Dumper=dumper, sort_keys=False, allow_unicode=True, default_flow_style=False, width=110
    )
    return text


def _is_stage(step: PlannedStep) -> bool:
    """Whether a step is known by a stage's name, not by its own id."""
    return step.key.partition("@")[0].partition("#")[0] != step.step_id


def _note(step: PlannedStep, numbers: dict[str, int], terminal: Terminal) -> str:
    if step.cached is not None:
        refs = ", ".join(step.cached.values())
        return terminal.style(f"cached  {refs}" if refs else "cached", "green", "dim")
    parts = [f"{port} ← {_source(source, numbers)}" for port, source in step.inputs.items()]
    parts += [f"{port.name} ← ?" for port in step.manifest.consumes if port.required and port.name not in step.inputs]
    text = terminal.style(printable(", ".join(parts)), "dim")
    if step.changes is not None and step.changes.code:
        stale = terminal.style(printable(made_by(step.changes.version, step.changes.code)), "yellow")
        text = f"{text}  {stale}" if text else stale
    if step.inserted:
        inserted = terminal.style(f"inserted: {step.because}", "yellow")
        return f"{text}  {inserted}" if text else inserted
    return text


def _source(source: InputSource, numbers: dict[str, int]) -> str:
    from nemotron_steps.resolver.plan import StepOutput

    if isinstance(source, StepOutput):
        return str(numbers[source.step_key])
    return redact_text(source.ref)
