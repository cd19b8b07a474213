"""`steps artifacts list|show|lineage|diff|verify|add`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemotron_steps.cli.errors import print_json, render
from nemotron_steps.cli.terminal import Terminal, number
from nemotron_steps.errors import ArtifactError
from nemotron_steps.runs.log_format import readable_size as size
from nemotron_steps.session.jobs import printable, shown_path
from nemotron_steps.session.session import Session

if TYPE_CHECKING:
    import argparse

    from nemotron_steps.artifacts.compare import Difference, Pair, TensorChanges
    from nemotron_steps.artifacts.integrity import Verified
    from nemotron_steps.artifacts.lineage import Lineage
    from nemotron_steps.artifacts.models import Artifact
    from nemotron_steps.artifacts.store import ArtifactStore

_SHOWN = 10
"""Lines of a list; `--json` has all."""


def list_artifacts(arguments: argparse.Namespace) -> int:
    """`steps artifacts list`."""
    session = Session(arguments.home)
    found = session.store.list_artifacts(name=arguments.name)
    if arguments.type is not None:
        wanted = session.registry.type(arguments.type).name
        found = [artifact for artifact in found if session.registry.types.is_a(artifact.type, wanted)]
    if arguments.as_json:
        return print_json([_fields(artifact, session.store, refuse=False) for artifact in found])
    terminal = Terminal.of()
    if not found:
        terminal.print("no artifacts" + (" of this kind" if arguments.type or arguments.name else " yet"))
        terminal.print(f"  {terminal.style('hint:', 'cyan')} steps artifacts add PATH")
        return 0
    terminal.table(
        [
            [
                artifact.ref,
                terminal.style(printable(artifact.type), "cyan"),
                terminal.style(size(sum(file.size for file in artifact.files)).rjust(8), "dim"),
                terminal.style(time.strftime("%Y-%m-%d %H:%M", time.localtime(artifact.created)), "dim"),
                terminal.style(_origin(artifact), "dim"),
            ]
            for artifact in found
        ]
    )
    return 0


def show_artifacts(arguments: argparse.Namespace) -> int:
    """`steps artifacts show REF`."""
    from nemotron_steps.artifacts.integrity import place_of

    store = Session(arguments.home).store
    artifact = store.find(arguments.ref)
    place = place_of(store, artifact)
    if arguments.as_json:
        return print_json(_fields(artifact, store))
    terminal = Terminal.of()
    terminal.print(f"{terminal.style(artifact.ref, 'bold')}  {terminal.style(artifact.type, 'cyan')}")
    rows = [
        ["digest", artifact.digest],
        ["made by", _origin(artifact)],
        *([["accepted", artifact.producer.acceptance]] if artifact.producer and artifact.producer.accepted else []),
        ["created", time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(artifact.created))],
        ["path", shown_path(place)],
        *(["input", f"{edge.port} = {edge.ref or edge.digest[:12]}"] for edge in artifact.inputs),
        *([f"{name}", _shown(value)] for name, value in sorted(artifact.attributes.items())),
    ]
    terminal.table([[terminal.style(name, "dim"), printable(str(value))] for name, value in rows], indent=2)
    terminal.print(f"  {terminal.style(f'{len(artifact.files)} files', 'dim')}")
    terminal.table([[size(file.size).rjust(8), printable(file.path)] for file in artifact.files[:20]], indent=4)
    if len(artifact.files) > 20:
        terminal.print(f"    … {len(artifact.files) - 20} more")
    return 0


def lineage_artifacts(arguments: argparse.Namespace) -> int:
    """`steps artifacts lineage REF`: a tree of what it was made from, and what was made from it."""
    from nemotron_steps.artifacts.lineage import lineage

    store = Session(arguments.home).store
    found = lineage(store, store.find(arguments.ref))
    if arguments.as_json:
        return print_json(found.to_dict())
    terminal = Terminal.of()
    terminal.print(f"{terminal.style(found.of.ref, 'bold')}  {terminal.style(found.of.type, 'cyan')}")
    if found.accepted:
        terminal.print(f"  {terminal.style(printable(f'accepted {found.accepted}'), 'dim')}")
    terminal.tree(_ancestors(found, found.of.ref, terminal, {found.of.ref}))
    below = {link.child for link in found.descendants if link.parent == found.of.ref}
    if below:
        terminal.print()
        terminal.print(terminal.style("used by", "dim"))
        terminal.tree({name: {} for name in sorted(below)})
    return 0


def verify_artifacts(arguments: argparse.Namespace) -> int:
    """`steps artifacts verify [REF ...]`: exit code 2 if anything is not what was committed.

    Without a reference it looks at all there is: artifacts, records that no name leads to, and what counts as cached.
    """
    store = Session(arguments.home).store
    terminal = Terminal.of()
    results = []
    failed = None
    for each in _looked_at(store, arguments.ref):
        results.append({"ref": each.ref, "digest": each.digest, "problems": [p.to_dict() for p in each.problems]})
        failed = failed or next(iter(each.problems), None)
        if arguments.as_json:
            continue
        mark = terminal.style("✗", "red") if each.problems else terminal.style("✓", "green")
        terminal.print(f"{mark} {printable(each.ref)}")
        for problem in each.problems:
            render(problem, terminal)
    if arguments.as_json:
        print_json(results)
    elif not results:
        terminal.print("no artifacts yet")
    return failed.exit_code if failed is not None else 0


def _looked_at(store: ArtifactStore, refs: Sequence[str]) -> Iterator[Verified]:
    from nemotron_steps.artifacts.integrity import Contents, Verified, verify_home
    from nemotron_steps.runs.cache import verify_entries

    if not refs:
        yield from verify_home(store)
        yield from verify_entries(store)
        return
    contents = Contents(store)
    for ref in refs:
        artifact = store.find(ref)
        yield Verified(artifact.ref, artifact.digest, tuple(contents.problems(artifact)))


def add_artifacts(arguments: argparse.Namespace) -> int:
    """`steps artifacts add PATH`."""
    session = Session(arguments.home)
    supertypes: tuple[str, ...] = ()
    if arguments.type is not None:
        supertypes = tuple(session.registry.types.ancestors(session.registry.type(arguments.type).name))
    artifact = session.store.add(
        Path(arguments.path).expanduser(), type_name=arguments.type, name=arguments.name, supertypes=supertypes
    )
    if arguments.as_json:
        return print_json(_fields(artifact, session.store))
    terminal = Terminal.of()
    terminal.print(f"{terminal.style(artifact.ref, 'bold')}  {terminal.style(artifact.type, 'cyan')}")
    terminal.print(f"  {terminal.style(f'--input PORT={artifact.ref}', 'cyan')}")
    return 0


def _fields(artifact: Artifact, store: ArtifactStore, *, refuse: bool = True) -> dict[str, Any]:
    """An artifact as JSON. A folder that this user never supplied is refused, or else left out."""
    from nemotron_steps.artifacts.integrity import place_of

    fields: dict[str, Any] = {**artifact.to_json(), "ref": artifact.ref}
    try:
        return {**fields, "path": str(place_of(store, artifact))}
    except ArtifactError:
        if refuse:
            raise
        return {**fields, "path": None, "location": None}


def _origin(artifact: Artifact) -> str:
    if artifact.producer is not None:
        accepted = ", accepted" if artifact.producer.accepted else ""
        return printable(f"{artifact.producer.step} (run {artifact.producer.run}{accepted})")
    return f"added from {printable(artifact.source)}" if artifact.source else "added"


def _shown(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _ancestors(found: Lineage, ref: str, terminal: Terminal, shown: set[str]) -> dict[str, Any]:
    """What a version was made from, as a tree; what two branches share is drawn below the first of them."""
    tree: dict[str, Any] = {}
    for link in found.ancestors:
        if link.child != ref:
            continue
        repeated = link.parent in shown and any(each.child == link.parent for each in found.ancestors)
        note = f"{link.port} of {link.step}" + (", see above" if repeated else "")
        note += f", accepted {link.accepted}" if link.accepted else ""
        label = f"{link.parent}  {terminal.style(printable(note), 'dim')}"
        fresh = link.parent not in shown
        shown.add(link.parent)
        tree[label] = _ancestors(found, link.parent, terminal, shown) if fresh else {}
    return tree


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
        _show_difference(found, config, Terminal.of())
    return 0 if found.same else 1


def _show_difference(found: Difference, config: dict[str, Pair] | None, terminal: Terminal) -> None:
    verdict = ("the same", "green") if found.same else ("different", "yellow")
    names = f"{found.a.ref} → {found.b.ref}"
    terminal.print(f"{terminal.style(printable(names), 'bold')}  {terminal.style(verdict[0], verdict[1])}")
    _pairs("attributes", found.attributes, terminal)
    _pairs("made from", found.inputs, terminal)
    for ref, only in zip((found.a.ref, found.b.ref), found.ancestors, strict=True):
        _names(f"only in the lineage of {ref}", only, terminal)
    if config is None and (found.a.producer or found.b.producer):
        terminal.print(f"  {terminal.style('config: the run of one of them is gone', 'dim')}")
    _pairs("config", config or {}, terminal)
    files = {path: tuple(None if each is None else size(each) for each in pair) for path, pair in found.files.items()}
    _pairs("files", files, terminal)
    for path, changes in found.rows.items():
        counts = f"{changes.added} added, {changes.removed} removed, {changes.same} the same"
        _title(f"rows of {path}: {counts}", terminal)
    if found.tensors is not None:
        _show_tensors(found.tensors, terminal)
    elif any(path.endswith(".distcp") for path in found.files):
        hint = "steps run convert/megatron_to_hf --input checkpoint_megatron=REF   # of each, for their weights"
        terminal.print(f"  {terminal.style('hint:', 'cyan')} {hint}")


def _show_tensors(changes: TensorChanges, terminal: Terminal) -> None:
    name, largest = next(iter(changes.differing.items()), ("", None))
    most = f", largest difference {number(largest)} in {name}" if largest is not None else ""
    _title(f"tensors: {len(changes.differing)} differ, {changes.same} the same{most}", terminal)
    rows = [
        [name, "cannot be compared" if value is None else number(value)] for name, value in changes.differing.items()
    ]
    terminal.table([[printable(cell) for cell in row] for row in rows[:_SHOWN]], indent=4)
    _more(len(rows), terminal)
    _pairs("type and shape", changes.reshaped, terminal)
    _names("only in the first", changes.only_a, terminal)
    _names("only in the second", changes.only_b, terminal)


def _pairs(title: str, pairs: dict[str, Any], terminal: Terminal) -> None:
    if not pairs:
        return
    _title(title, terminal)
    rows = [[name, f"{_or_dash(a)} → {_or_dash(b)}"] for name, (a, b) in pairs.items()]
    terminal.table([[printable(cell) for cell in row] for row in rows[:_SHOWN]], indent=4)
    _more(len(rows), terminal)


def _names(title: str, names: list[str], terminal: Terminal) -> None:
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


def _or_dash(value: Any) -> str:
    return "—" if value is None else str(value)
