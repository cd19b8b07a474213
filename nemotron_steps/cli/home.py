"""`steps home`, `steps gc`: what the home holds, and freeing what nothing needs."""

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from nemotron_steps.cli.errors import print_json
from nemotron_steps.cli.terminal import Terminal
from nemotron_steps.runs import home as homes
from nemotron_steps.runs.log_format import readable_size as size
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
    out, freed = Terminal.of(), (_KINDS[homes.LEFT], _KINDS[homes.UNNAMED], _KINDS[homes.WORK] + homes.FINISHED)
    out.print(f"{out.style(shown_path(place), 'bold')}  {size(total)}")
    rows = []
    for title, whole in kinds.items():
        for of, part in {"": whole, **whole["of"]}.items():
            hint = out.style("steps gc", "cyan") if part["count"] and title + of in freed else ""
            cells = f"{part['count']:,}".rjust(6), size(part["size"]).rjust(8)
            rows.append([printable(f"  {of}" if of else title), *cells, hint])
    rows.append(["other", "", size(total - _sum(inside)["size"]).rjust(8), ""])
    out.table(rows, indent=2, flexible=0)
    return 0


def gc(args: argparse.Namespace) -> int:
    """`steps gc`."""
    store, out = Session(args.home).store, Terminal.of()
    wanted = homes.to_free(store, days=args.runs, artifacts=args.artifact)
    nobody = UsageError("gc deletes, and nobody is here to be asked", hints=("--dry-run", "--yes"))
    if args.as_json:
        if not (args.yes or args.dry_run):
            raise nobody
        freed = wanted if args.dry_run else homes.free(store, wanted)
        fields = [{**vars(held), "path": str(held.path)} for held in freed]
        return print_json({"dry_run": args.dry_run, "size": _sum(freed)["size"], "freed": fields})
    names = {held: held.name if held.kind in (homes.ARTIFACT, homes.RUN) else shown_path(held.path) for held in wanted}
    out.table(
        [[_KINDS[held.kind], size(held.size).rjust(8), printable(name)] for held, name in names.items()], indent=2
    )
    out.print(f"to free: {size(_sum(wanted)['size'])}" if wanted else "nothing to free")
    if args.dry_run or not wanted:
        return 0
    if not args.yes and not out.confirm("delete?", "nothing was deleted"):
        raise nobody
    freed = homes.free(store, wanted)
    for held in set(wanted) - set(freed):
        out.print(f"kept, somebody uses it now: {printable(names[held])}")
    out.print(f"{out.style('✓', 'green')} freed {size(_sum(freed)['size'])}")
    return 0


def _sum(found: Iterable[homes.Held]) -> dict[str, int]:
    each = list(found)
    return {"count": len(each), "size": sum({held.path: held.size for held in each}.values())}
