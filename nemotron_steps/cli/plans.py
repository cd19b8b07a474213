"""How a plan looks: its steps, what each reads and needs, the memory and the batch of what trains."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

from nemotron_steps.artifacts.models import made_by
from nemotron_steps.cli.errors import typed
from nemotron_steps.cli.terminal import Terminal
from nemotron_steps.config.secrets import redact, redact_text
from nemotron_steps.resolver.plan import StepOutput
from nemotron_steps.session.jobs import printable
from nemotron_steps.session.run_request import RunRequest

if TYPE_CHECKING:
    from nemotron_steps.config.layout.memory.devices import DeviceMemory, StepMemory
    from nemotron_steps.config.layout.memory.settings import BatchArithmetic
    from nemotron_steps.resolver.plan import InputSource, Plan, PlannedStep

_ORDER = ("weights", "optimizer", "gradients", "reference weights", "activations", "logprobs", "cache", "logits")
_RANKS = {"policy": 0, "generator": 1, "device": 3}
_GIB = 2**30


def plan_fields(found: Plan) -> dict[str, Any]:
    """A plan as JSON fields, redacted."""
    fields: dict[str, Any] = redact(found.to_dict())
    for step in fields["steps"]:
        step["overrides"] = [redact_text(text) for text in step["overrides"]]
    return fields


def show_plan(found: Plan, request: RunRequest, terminal: Terminal, *, why: bool = False) -> None:
    """The plan as a table: what is cached, what runs, where each input comes from, which converters were inserted.

    Args:
        why: with what changed of each step that must run.
    """
    numbers = {step.key: index for index, step in enumerate(found.steps, start=1)}
    cached = sum(step.cached is not None for step in found.steps)
    count = f"{len(found.steps)} step" + ("s" if len(found.steps) != 1 else "")
    state = "all cached" if cached == len(found.steps) else f"{cached} cached" if cached else "nothing cached"
    head = terminal.style(printable(request.redacted().command), "bold")
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
        command = same or typed[0].hint(f"steps run {request.redacted().typed} {accept}")
        note = terminal.style("note:", "yellow")
        terminal.print(f"  {note} only code changed since; to take what is there as it is:")
        terminal.print(f"    {terminal.style(printable(redact_text(command)), 'cyan')}")
    if why:
        _show_why(found, numbers, terminal)
    _show_memory(found, terminal)


def _show_why(found: Plan, numbers: dict[str, int], terminal: Terminal) -> None:
    """What changed of each step that must run against the nearest earlier result of it."""
    for step in found.steps:
        if step.cached is None:
            changes = step.changes
            since = f"since run {changes.run}" if changes is not None and changes.run else ""
            terminal.print(f"  {numbers[step.key]}  {terminal.style(step.key, 'bold')}  {terminal.style(since, 'dim')}")
            for line in changes.differences if changes is not None else ("no earlier result of it is here",):
                terminal.print(f"      {printable(redact_text(line))}")


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
    if isinstance(source, StepOutput):
        return str(numbers[source.step_key])
    return redact_text(source.ref)


def show_needs(found: Plan, request: RunRequest, terminal: Terminal) -> None:
    """What the steps still to run need and this machine lacks; under a profile, what was not asked of its machines."""
    from nemotron_steps.runs.prerequisites import missing, needs_of

    if request.profile is not None:
        needs = dict.fromkeys(need for step in found if step.cached is None for need in needs_of(step))
        if needs:
            text = f"not asked of this machine, but needed where {request.profile} runs it: {', '.join(needs)}"
            terminal.print(f"  {terminal.style('note:', 'yellow')} {printable(text)}")
        return
    for finding, steps in missing(found, tried=False):
        keys = ", ".join(step.key for step in steps)
        terminal.print(f"  {terminal.style('will need', 'yellow')} {printable(f'{finding.name}, for {keys}')}")
        for line in finding.fix.splitlines()[:1]:
            terminal.print(f"      {terminal.style(printable(line), 'cyan')}")


def show_unfilled(found: Plan, terminal: Terminal) -> None:
    """What a plan that is only looked at still lacks."""
    if not found.unfilled:
        return
    terminal.print()
    terminal.print(terminal.style(f"to be filled in before it can run: {len(found.unfilled)}", "bold"))
    for problem in found.unfilled:
        wanted = f": {problem.expected}" if problem.expected else ""
        terminal.print(f"  {terminal.style('○', 'yellow')} {printable(redact_text(problem.what + wanted))}")
        for hint in problem.hints[:2]:
            terminal.print(f"      {terminal.style(printable(redact_text(hint)), 'cyan')}")


def _show_memory(found: Plan, terminal: Terminal) -> None:
    """Of every step of a plan that is to run and trains something, or whose model writes chats."""
    for step in found.steps:
        memory = step.memory if step.memory is not None and (step.memory.batch or step.memory.devices) else None
        if step.cached is None and (memory or step.turn_ends):
            terminal.print()
            terminal.print(f"  {terminal.style(step.key, 'bold')}")
            if memory is not None:
                _show_step_memory(memory, terminal)
            for port, ends in step.turn_ends.items():
                terminal.wrap(f"a turn of {port} ends with {' or '.join(map(printable, ends))}", indent=4)


def _show_step_memory(memory: StepMemory, terminal: Terminal) -> None:
    if memory.batch is not None:
        for line in _batch(memory.batch):
            terminal.wrap(line, indent=4)
    for device in memory.devices:
        if device.capacity is None:
            terminal.wrap(f"host memory of the process that {device.name}: {_size(device.peak)}", indent=4)
        else:
            _show_device(device, terminal)
    for role, tokens in memory.cache_tokens.items():
        terminal.wrap(f"cache of one {role} of vLLM's: room for about {tokens:,} tokens", indent=4)
    for what, count in memory.host.items():
        if memory.devices and memory.devices[0].capacity is not None:
            terminal.wrap(f"host memory beside each such GPU: {what} {_size(count)}", indent=4)
    if memory.on_gpu and memory.unknown:
        terminal.wrap(f"memory of {', '.join(memory.unknown)} not predicted: no model is known yet", indent=4)


def _batch(batch: BatchArithmetic) -> list[str]:
    """From prompts to micro-batches, in words."""
    parts = []
    if batch.rollouts is not None:
        parts.append(f"{batch.prompts:,} prompts × {batch.group:,} = {batch.rollouts:,} rollouts")
    parts.append(f"global batch {batch.batch:,}" + (f" × {_count(batch.updates, 'update')}" if batch.updates else ""))
    parts.append(f"{_count(batch.data_parallel, 'data-parallel rank')} × {batch.rows:,}")
    parts.append(
        f"at most {_count(batch.micro_batches, 'micro-batch', 'micro-batches')} of {batch.tokens:,} tokens"
        + ("" if batch.budget else f" in {_count(batch.micro_rows, 'row')}")
    )
    return [" → ".join(parts)]


def _count(count: int | None, what: str, several: str | None = None) -> str:
    return f"{count:,} {what if count == 1 else several or what + 's'}"


def _show_device(device: DeviceMemory, terminal: Terminal) -> None:
    """A row for each thing that takes memory, a column for each phase."""
    assert device.capacity is not None
    phases = list(device.phases)
    keys = {key for lines in device.phases.values() for key in lines}
    rows = [["", "GiB", *phases]]
    before = None
    places = {line: place for place, line in enumerate(_ORDER)}
    order = [(_RANKS.get(role, 2), role, places.get(line, len(places)), line) for role, line in keys]
    for _, role, _, line in sorted(order):
        counts = [_gib(device.phases[phase].get((role, line))) for phase in phases]
        rows.append([role if role != before else "", line, *counts])
        before = role
    rows.append(["total", "", *(_gib(device.total(phase)) for phase in phases)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    terminal.wrap(f"one GPU of {device.capacity / _GIB:.0f} GiB that {device.name}, predicted:", indent=4)
    styles = {0: "dim", len(rows) - 1: "bold"}
    aligned = [
        [
            terminal.style(cell.rjust(width) if column > 1 else cell, *([styles[number]] if number in styles else []))
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        for number, row in enumerate(rows)
    ]
    terminal.table(aligned, indent=6)


def _gib(count: int | None) -> str:
    return "-" if count is None else f"{count / _GIB:.1f}"


def _size(count: int) -> str:
    return f"{count / _GIB:.1f} GiB" if count >= _GIB else f"{count / 2**20:.0f} MiB"
