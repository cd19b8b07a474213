"""`steps artifacts diff A B`: what two artifacts of one type have not in common."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nemotron_steps.cli.errors import print_json
from nemotron_steps.cli.terminal import Terminal, number, printable
from nemotron_steps.runs.log_format import readable_size as size
from nemotron_steps.session.session import Session

if TYPE_CHECKING:
    import argparse

    from nemotron_steps.artifacts.compare import Difference, Pair, TensorChanges

_SHOWN = 10
"""Lines of a list; `--json` has all."""


def diff_artifacts(arguments: argparse.Namespace) -> int:
    """`steps artifacts diff A B`: exit code 0 if they hold the same, 1 if not."""
    from nemotron_steps.artifacts.compare import compare, config_changes
    from nemotron_steps.artifacts.jsonable import plain
    from nemotron_steps.runs.cache import config_of

    store = Session(arguments.home).store
    found = compare(store, arguments.a, arguments.b)
    configs = [config_of(store, each) for each in (found.a, found.b)]
    config = None if None in configs else config_changes(configs[0] or {}, configs[1] or {})
    if arguments.as_json:
        print_json(plain({**found.to_dict(), "config": config}))
    else:
        _show(found, config, Terminal.of())
    return 0 if found.same else 1


def _show(found: Difference, config: dict[str, Pair] | None, terminal: Terminal) -> None:
    verdict = ("the same", "green") if found.same else ("different", "yellow")
    names = f"{found.a.ref} → {found.b.ref}"
    terminal.print(f"{terminal.style(printable(names), 'bold')}  {terminal.style(verdict[0], verdict[1])}")
    _pairs("attributes", found.attributes, terminal)
    _pairs("made from", found.inputs, terminal)
    for ref, only in zip((found.a.ref, found.b.ref), found.ancestors, strict=True):
        _list(f"only in the lineage of {ref}", only, terminal)
    if config is None and (found.a.producer or found.b.producer):
        terminal.print(f"  {terminal.style('config: the run of one of them is gone', 'dim')}")
    _pairs("config", config or {}, terminal)
    files = {path: tuple(None if each is None else size(each) for each in pair) for path, pair in found.files.items()}
    _pairs("files", files, terminal)
    for path, changes in found.rows.items():
        counts = f"{changes.added} added, {changes.removed} removed, {changes.changed} changed, {changes.same} the same"
        _title(f"rows of {path}: {counts}", terminal)
        for each in changes.examples:
            lines = " → ".join(str(line) for line in (each.line_a, each.line_b) if line is not None)
            what = ", ".join(each.keys) or each.text
            terminal.print(f"    {terminal.style(each.kind, 'dim')} line {lines}  {printable(what)}")
    if found.tensors is not None:
        _show_tensors(found.tensors, terminal)
    elif any(path.endswith(".distcp") for path in found.files):
        hint = "steps run convert/megatron_to_hf --input checkpoint_megatron=REF   # of each, for their weights"
        terminal.print(f"  {terminal.style('hint:', 'cyan')} {hint}")


def _show_tensors(changes: TensorChanges, terminal: Terminal) -> None:
    largest = changes.largest
    most = f", largest difference {number(largest[1])} in {largest[0]}" if largest else ""
    _title(f"tensors: {len(changes.differing)} differ, {changes.same} the same{most}", terminal)
    rows = [
        [name, "cannot be compared" if value is None else number(value)] for name, value in changes.differing.items()
    ]
    terminal.table([[printable(cell) for cell in row] for row in rows[:_SHOWN]], indent=4)
    _more(len(rows), terminal)
    _pairs("type and shape", changes.reshaped, terminal)
    _list("only in the first", changes.only_a, terminal)
    _list("only in the second", changes.only_b, terminal)


def _pairs(title: str, pairs: dict[str, Any], terminal: Terminal) -> None:
    if not pairs:
        return
    _title(title, terminal)
    rows = [[name, f"{_value(a)} → {_value(b)}"] for name, (a, b) in pairs.items()]
    terminal.table([[printable(cell) for cell in row] for row in rows[:_SHOWN]], indent=4)
    _more(len(rows), terminal)


def _list(title: str, names: list[str], terminal: Terminal) -> None:
    if names:
        _title(title, terminal)
        for name in names[:_SHOWN]:
            terminal.print(f"    {printable(name)}")
        _more(len(names), terminal)


def _title(text: str, terminal: Terminal) -> None:
    terminal.print(f"  {terminal.style(printable(text), 'cyan')}")


def _more(count: int, terminal: Terminal) -> None:
    if count > _SHOWN:
        terminal.print(f"    … {count - _SHOWN} more (--json has all)")


def _value(value: Any) -> str:
    return "—" if value is None else str(value)
