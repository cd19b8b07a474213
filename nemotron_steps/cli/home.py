"""`steps home`, `steps gc`: what the home holds, and freeing what nothing needs."""

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

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
    kinds: dict[str, dict[str, Any]] = {}
    for kind, title in _KINDS.items():
        of_kind = [held for held in found if held.kind == kind]
        parts = sorted({held.of for held in of_kind if held.of})
        kinds[title] = {**_sum(of_kind), "of": {of: _sum(held for held in of_kind if held.of == of) for of in parts}}
    if args.as_json:
        return print_json({"home": store.backend.url, "size": total, "kinds": kinds})
    out = Terminal.of()
    out.print(f"{out.style(shown_path(place), 'bold')}  {readable_size(total)}")
    rows = []
    for kind, title in _KINDS.items():
        lines = [(title, kinds[title], kind in (homes.LEFT, homes.UNNAMED))]
        lines += [(f"  {of}", part, kind == homes.WORK and of == FINISHED) for of, part in kinds[title]["of"].items()]
        for name, part, is_freed in lines:
            cells = f"{part['count']:,}".rjust(6), readable_size(part["size"]).rjust(8)
            rows.append([printable(name), *cells, out.style("steps gc", "cyan") if is_freed and part["count"] else ""])
    rows.append(["other", "", readable_size(total - _sum(inside)["size"]).rjust(8), ""])
    out.table(rows, indent=2, flexible=0)
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
