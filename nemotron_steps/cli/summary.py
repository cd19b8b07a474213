"""The end of a run: what improved and by how much, where the artifacts and the report are, what to do next."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nemotron_steps.cli.terminal import Terminal, duration, number, printable
from nemotron_steps.runs.log_format import columns_of, compared, is_change, is_table, values_of
from nemotron_steps.runs.seed_stats import MEANING, as_text
from nemotron_steps.session.jobs import shown_path

if TYPE_CHECKING:
    from nemotron_steps.manifest.registry import Registry
    from nemotron_steps.resolver.plan import Plan
    from nemotron_steps.runs.execute import RunResult, StepResult
    from nemotron_steps.runs.seed_stats import Table

_COLORS = {"good": "green", "bad": "red", "same": "dim"}
"""Of a change."""


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
    done = {step.step_id for step in result.steps}
    commands = []
    made = [artifact for step in result.steps for artifact in step.outputs.values()]
    for artifact in last.outputs.values():
        for consumer, port in _consumers(artifact.type, last.step_id, done, registry):
            fed = {port: artifact.ref}
            for other in registry.steps[consumer].consumes:
                fitting = [each.ref for each in made if registry.types.is_a(each.type, other.type)]
                if other.required and fitting:
                    fed.setdefault(other.name, fitting[-1])
            # A command that would only ask for more inputs is no advice.
            if all(other.name in fed for other in registry.steps[consumer].consumes if other.required):
                inputs = " ".join(f"--input {name}={ref}" for name, ref in fed.items())
                commands.append(f"steps run {consumer} {inputs}")
    commands += [f"steps artifacts lineage {artifact.ref}" for artifact in last.outputs.values()]
    if commands:
        terminal.print()
        terminal.print(f"  {terminal.style('next', 'dim')}")
    for command in commands[:3]:
        terminal.print(f"    {terminal.style(command, 'cyan')}")


def _consumers(type_name: str, made_by: str, done: set[str], registry: Registry) -> list[tuple[str, str]]:
    """Steps worth running on an artifact: an evaluation, a conversion, else one that needs nothing more, best training.

    Each with the port the artifact goes to. What was just converted is not converted again.
    """
    maker = registry.find_step(made_by)
    converted = maker is not None and maker.step.category == "convert"
    best: dict[str, tuple[str, str]] = {}
    training_first = sorted(registry.steps.items(), key=lambda each: each[1].step.category not in ("sft", "rl"))
    for step_id, manifest in training_first:
        if step_id in done or manifest.step.entry is None:
            continue
        required = [port.name for port in manifest.consumes if port.required]
        kind = manifest.step.category if manifest.step.category in ("eval", "convert") else "other"
        if kind == "convert" and converted:
            continue
        for port in manifest.consumes:
            if registry.types.is_a(type_name, port.type) and (kind != "other" or required == [port.name]):
                best.setdefault(kind, (step_id, port.name))
    preferred = [best[kind] for kind in ("eval", "convert") if kind in best]
    return preferred or list(best.values())
