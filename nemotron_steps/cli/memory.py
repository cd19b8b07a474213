"""The memory and the batch of planned training steps, as a small table each, and what ends their models' turns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nemotron_steps.cli.terminal import Terminal, printable

if TYPE_CHECKING:
    from nemotron_steps.config.layout.memory.devices import DeviceMemory, StepMemory
    from nemotron_steps.config.layout.memory.settings import BatchArithmetic
    from nemotron_steps.resolver.plan import Plan

_ORDER = ("weights", "optimizer", "gradients", "reference weights", "activations", "logprobs", "cache", "logits")
_RANKS = {"policy": 0, "generator": 1, "device": 3}
_GIB = 2**30


def show_memory(found: Plan, terminal: Terminal) -> None:
    """Of every step of a plan that is to run and trains something, or whose model writes chats."""
    for step in found.steps:
        memory = step.memory if step.memory is not None and (step.memory.batch or step.memory.devices) else None
        if step.cached is None and (memory or step.turn_ends):
            terminal.print()
            terminal.print(f"  {terminal.style(step.key, 'bold')}")
            if memory is not None:
                _show(memory, terminal)
            for port, ends in step.turn_ends.items():
                terminal.wrap(f"a turn of {port} ends with {' or '.join(map(printable, ends))}", indent=4)


def _show(memory: StepMemory, terminal: Terminal) -> None:
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
