"""How a plan looks: its steps, what each reads and needs, the memory and the batch of what trains."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

from nemotron_steps.artifacts.models import made_by
from nemotron_steps.cli.errors import called
from nemotron_steps.cli.terminal import Terminal
from nemotron_steps.config.secrets import redact, redact_text
from nemotron_steps.resolver.plan import StepOutput
from nemotron_steps.session.jobs import printable
from nemotron_steps.session.run_request import RunRequest

if TYPE_CHECKING:
    from nemotron_steps.config.layout.memory.devices import DeviceMemory
    from nemotron_steps.config.layout.memory.settings import BatchArithmetic
    from nemotron_steps.resolver.plan import Plan, PlannedStep

_ORDER = ("weights", "optimizer", "gradients", "reference weights", "activations", "logprobs", "cache", "logits")
_RANKS = {"policy": 0, "generator": 1, "device": 3}
_GIB = 2**30


def plan_fields(found: Plan) -> dict[str, Any]:
    """A plan as JSON fields, redacted."""
    fields: dict[str, Any] = redact(found.to_dict())
    for step in fields["steps"]:
        step["overrides"] = [redact_text(text) for text in step["overrides"]]
    return fields


def show_plan(found: Plan, request: RunRequest, out: Terminal, *, why: bool = False) -> None:
    """The plan as a table; `why`: with what changed of each step that must run."""
    numbers = {step.key: index for index, step in enumerate(found.steps, start=1)}
    cached = sum(step.cached is not None for step in found.steps)
    count = f"{len(found.steps)} step" + ("s" if len(found.steps) != 1 else "")
    state = "all cached" if cached == len(found.steps) else f"{cached} cached" if cached else "nothing cached"
    head = out.style(printable(request.redacted().command), "bold")
    out.print(f"{head}  {out.style(f'{count}, {state}', 'dim')}")
    has_stages = any(_is_stage(step) for step in found.steps)
    rows = []
    for step in found.steps:
        done = step.cached is not None
        mark = out.style("✓", "green") if done else out.style("●", "cyan")
        name = out.style(step.key, *(["dim"] if done else ["bold"] if step.key in found.goals else []))
        config = out.style(step.config_name or "default", "dim")
        row = [mark, out.style(str(numbers[step.key]), "dim"), name, config, _note(step, numbers, out)]
        if has_stages:
            row.insert(3, out.style(step.step_id, "dim") if _is_stage(step) else "")
        rows.append(row)
    out.table(rows, indent=2, below=7)
    for warning in found.warnings:
        out.print(f"  {out.style('note:', 'yellow')} {printable(warning)}")
    by_code = [step.key for step in found.steps if step.changes is not None and step.changes.code]
    if by_code:
        accept = " ".join(f"--accept {shlex.quote(key)}" for key in by_code)
        command = called(f"steps run {request.redacted().typed} {accept}")
        note = out.style("note:", "yellow")
        out.print(f"  {note} only code changed since; to take what is there as it is:")
        out.print(f"    {out.style(printable(redact_text(command)), 'cyan')}")
    for step in found.steps if why else ():
        if step.cached is None:
            changes = step.changes
            since = f"since run {changes.run}" if changes is not None and changes.run else ""
            out.print(f"  {numbers[step.key]}  {out.style(step.key, 'bold')}  {out.style(since, 'dim')}")
            for line in changes.differences if changes is not None else ("no earlier result of it is here",):
                out.print(f"      {printable(redact_text(line))}")
    for step in found.steps:
        if step.cached is None:
            _show_memory(step, out)


def _is_stage(step: PlannedStep) -> bool:
    """Whether a step is known by a stage's name, not by its own id."""
    return step.key.partition("@")[0].partition("#")[0] != step.step_id


def _note(step: PlannedStep, numbers: dict[str, int], out: Terminal) -> str:
    if step.cached is not None:
        refs = ", ".join(step.cached.values())
        return out.style(f"cached  {refs}" if refs else "cached", "green", "dim")
    sources = dict.fromkeys((port.name for port in step.manifest.consumes if port.required), "?")
    for port, source in step.inputs.items():
        if isinstance(source, StepOutput):
            sources[port] = str(numbers[source.step_key])
        else:
            sources[port] = redact_text(source.ref)
    text = printable(", ".join(f"{port} ← {source}" for port, source in sources.items()))
    notes = [out.style(text, "dim")]
    if step.changes is not None and step.changes.code:
        notes.append(out.style(printable(made_by(step.changes.version, step.changes.code)), "yellow"))
    if step.inserted:
        notes.append(out.style(f"inserted: {step.because}", "yellow"))
    return "  ".join(filter(None, notes))


def show_needs(found: Plan, request: RunRequest, out: Terminal, size: str = "") -> None:
    """What the steps still to run need and this machine lacks; under a profile, what was not asked of its machines, and
    the `size` of its job."""
    from nemotron_steps.runs.prerequisites import missing, needs_of

    if request.profile is not None:
        needs = dict.fromkeys(need for step in found if step.cached is None for need in needs_of(step))
        if needs:
            text = f"not asked of this machine, but needed where {request.profile} runs it: {', '.join(needs)}"
            out.print(f"  {out.style('note:', 'yellow')} {printable(text)}")
        out.print(f"  {out.style(printable(size), 'bold')}") if size else None
        return
    for finding, steps in missing(found, tried=False):
        keys = ", ".join(step.key for step in steps)
        out.print(f"  {out.style('will need', 'yellow')} {printable(f'{finding.name}, for {keys}')}")
        for line in finding.fix.splitlines()[:1]:
            out.print(f"      {out.style(printable(line), 'cyan')}")


def show_unfilled(found: Plan, out: Terminal) -> None:
    """What a plan that is only looked at still lacks."""
    if found.unfilled:
        head = f"to be filled in before it can run: {len(found.unfilled)}"
        out.print(f"\n{out.style(head, 'bold')}")
    for problem in found.unfilled:
        wanted = f": {problem.expected}" if problem.expected else ""
        out.print(f"  {out.style('○', 'yellow')} {printable(redact_text(problem.what + wanted))}")
        for hint in problem.hints[:2]:
            out.print(f"      {out.style(printable(redact_text(called(hint))), 'cyan')}")


def _show_memory(step: PlannedStep, out: Terminal) -> None:
    memory = step.memory if step.memory is not None and (step.memory.batch or step.memory.devices) else None
    if memory is None and not step.turn_ends:
        return
    out.print(f"\n  {out.style(step.key, 'bold')}")
    if memory is not None:
        if memory.batch is not None:
            out.wrap(_batch(memory.batch), indent=4)
        for device in memory.devices:
            if device.capacity is None:
                out.wrap(f"host memory of the process that {device.name}: {_size(device.peak)}", indent=4)
            else:
                _show_device(device, device.capacity, out)
        for role, tokens in memory.cache_tokens.items():
            out.wrap(f"cache of one {role} of vLLM's: room for about {tokens:,} tokens", indent=4)
        for what, count in memory.host.items():
            if memory.devices and memory.devices[0].capacity is not None:
                out.wrap(f"host memory beside each such GPU: {what} {_size(count)}", indent=4)
        if memory.on_gpu and memory.unknown:
            unknown = ", ".join(memory.unknown)
            out.wrap(f"memory of {unknown} not predicted: no model is known yet", indent=4)
    for port, ends in step.turn_ends.items():
        out.wrap(f"a turn of {port} ends with {' or '.join(map(printable, ends))}", indent=4)


def _batch(batch: BatchArithmetic) -> str:
    parts = []
    if batch.rollouts is not None:
        parts.append(f"{batch.prompts:,} prompts × {batch.group:,} = {batch.rollouts:,} rollouts")
    parts.append(f"global batch {batch.batch:,}" + (f" × {_count(batch.updates, 'update')}" if batch.updates else ""))
    parts.append(f"{_count(batch.data_parallel, 'data-parallel rank')} × {batch.rows:,}")
    parts.append(
        f"at most {_count(batch.micro_batches, 'micro-batch', 'micro-batches')} of {batch.tokens:,} tokens"
        + ("" if batch.budget else f" in {_count(batch.micro_rows, 'row')}")
    )
    return " → ".join(parts)


def _count(count: int | None, what: str, several: str | None = None) -> str:
    return f"{count:,} {what if count == 1 else several or what + 's'}"


def _show_device(device: DeviceMemory, capacity: int, out: Terminal) -> None:
    """A row for each thing that takes memory, a column for each phase, in GiB."""
    phases = list(device.phases)
    keys = {key for lines in device.phases.values() for key in lines}
    places = {line: place for place, line in enumerate(_ORDER)}
    rows, before = [["", "GiB", *phases]], None
    for role, line in sorted(keys, key=lambda k: (_RANKS.get(k[0], 2), k[0], places.get(k[1], len(places)), k[1])):
        found = (device.phases[phase].get((role, line)) for phase in phases)
        counts = ["-" if count is None else f"{count / _GIB:.1f}" for count in found]
        rows.append([role if role != before else "", line, *counts])
        before = role
    rows.append(["total", "", *(f"{device.total(phase) / _GIB:.1f}" for phase in phases)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    out.wrap(f"one GPU of {capacity / _GIB:.0f} GiB that {device.name}, predicted:", indent=4)
    for row in rows:
        row[2:] = [cell.rjust(width) for cell, width in zip(row[2:], widths[2:], strict=True)]
    rows[0] = [out.style(cell, "dim") for cell in rows[0]]
    rows[-1] = [out.style(cell, "bold") for cell in rows[-1]]
    out.table(rows, indent=6)


def _size(count: int) -> str:
    return f"{count / _GIB:.1f} GiB" if count >= _GIB else f"{count / 2**20:.0f} MiB"
