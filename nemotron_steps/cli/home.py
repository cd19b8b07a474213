"""`steps home`, `steps gc`: what the home holds, and freeing what nothing needs."""

import argparse
from collections.abc import Iterable
from pathlib import Path

from nemotron_steps.cli.errors import print_json
from nemotron_steps.cli.terminal import Terminal
from nemotron_steps.runs import home as homes
from nemotron_steps.runs.home import FINISHED, Held
from nemotron_steps.runs.log_format import readable_size
from nemotron_steps.session.jobs import printable, shown_path
from nemotron_steps.session.run_request import UsageError
from nemotron_steps.session.session import Session

_KINDS = {
    homes.ARTIFACT: "artifacts",
    homes.RUN: "runs",
    homes.WORK: "work folders",
    homes.GIVEN: "given in Python",
    homes.LEFT: "left by killed commands",
    homes.UNNAMED: "without a name",
}


def home(args: argparse.Namespace) -> int:
    """`steps home`."""
    store = Session(args.home).store
    found, place = homes.survey(store), Path(store.backend.url)
    total, inside = homes.size_of(place), [held for held in found if place in held.path.parents]
    kinds = {}
    for kind, title in _KINDS.items():
        of_kind = [held for held in found if held.kind == kind]
        kinds[title] = {**_sum(of_kind), "of": {of: _sum(h for h in of_kind if h.of == of) for of in _parts(of_kind)}}
    kinds["other"] = {"count": None, "size": total - _sum(inside)["size"], "of": {}}
    if args.as_json:
        return print_json({"home": store.backend.url, "size": total, "kinds": kinds})
    out = Terminal.of()
    out.print(f"{out.style(shown_path(place), 'bold')}  {readable_size(total)}")
    rows = []
    for title, kind in kinds.items():
        free = title in (_KINDS[homes.LEFT], _KINDS[homes.UNNAMED]) and kind["count"]
        rows.append([title, *_cells(kind), out.style("steps gc", "cyan") if free else ""])
        for of, part in kind["of"].items():
            free = title == _KINDS[homes.WORK] and of == FINISHED
            rows.append([out.style(f"  {printable(of)}", "dim"), *_cells(part)])
            rows[-1].append(out.style("steps gc", "cyan") if free else "")
    out.table(rows, indent=2)
    return 0


def gc(args: argparse.Namespace) -> int:
    """`steps gc`."""
    store, out = Session(args.home).store, Terminal.of()
    wanted = homes.to_free(store, days=args.runs, artifacts=args.artifact)
    asks = not (args.yes or args.dry_run)
    if asks and (args.as_json or not out.can_ask):
        raise UsageError("gc deletes, and nobody is here to be asked", hints=("--dry-run", "--yes"))
    if not args.as_json:
        for kind, title in _KINDS.items():
            rows = [[shown(held), readable_size(held.size).rjust(8)] for held in wanted if held.kind == kind]
            if rows:
                out.print(out.style(title, "bold"))
                out.table(rows, indent=2, flexible=0)
        size = readable_size(_sum(wanted)["size"])
        out.print(f"{'to free' if wanted else 'nothing to free'}{f': {size}' if wanted else ''}")
    if asks and wanted:
        out.confirm("delete?", "nothing was deleted")
    freed = [] if args.dry_run else homes.free(store, wanted)
    if args.as_json:
        listed = wanted if args.dry_run else freed
        fields = [{"kind": h.kind, "name": h.name, "path": str(h.path), "size": h.size} for h in listed]
        return print_json({"dry_run": args.dry_run, "size": _sum(listed)["size"], "freed": fields})
    for held in wanted if not args.dry_run else ():
        if held not in freed:
            out.print(f"kept, somebody uses it now: {shown(held)}")
    if freed:
        out.print(f"{out.style('✓', 'green')} freed {readable_size(_sum(freed)['size'])}")
    return 0


def shown(held: Held) -> str:
    """A thing of the home, as it can be found again."""
    return printable(held.name if held.kind in (homes.ARTIFACT, homes.RUN) else shown_path(held.path))


def _sum(found: Iterable[Held]) -> dict[str, int]:
    each = list(found)
    return {"count": len(each), "size": sum({held.path: held.size for held in each}.values())}


def _parts(found: Iterable[Held]) -> list[str]:
    return sorted({held.of for held in found if held.of})


def _cells(part: dict) -> list[str]:
    return [("" if part["count"] is None else f"{part['count']:,}").rjust(6), readable_size(part["size"]).rjust(8)]
