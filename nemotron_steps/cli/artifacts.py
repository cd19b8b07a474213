"""`steps artifacts list|show|lineage|diff|verify|add|path|export`, `steps publish`; `steps home` and `steps gc`: what
the home holds, and freeing what nothing needs."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemotron_steps.cli.errors import print_json, render
from nemotron_steps.cli.terminal import Terminal
from nemotron_steps.errors import ArtifactError, RequestError
from nemotron_steps.runs import home as homes
from nemotron_steps.runs.log_format import readable_size as size
from nemotron_steps.session.jobs import printable, shown_path
from nemotron_steps.session.run_request import UsageError
from nemotron_steps.session.session import Session

if TYPE_CHECKING:
    import argparse

    from nemotron_steps.artifacts.lineage import Lineage
    from nemotron_steps.artifacts.models import Artifact
    from nemotron_steps.artifacts.store import ArtifactStore

_WHOLE = ("digest", "made by", "accepted", "created", "path", "input")
_SHOWN = 10
"""Lines of a list; `--json` has all."""


def list_artifacts(args: argparse.Namespace) -> int:
    """`steps artifacts list`."""
    session = Session(args.home)
    found = session.store.list_artifacts(name=args.name)
    if args.type is not None:
        wanted = session.registry.type(args.type).name
        found = [artifact for artifact in found if session.registry.types.is_a(artifact.type, wanted)]
    if args.as_json:
        return print_json([_fields(artifact, session.store, refuse=False) for artifact in found])
    out = Terminal.of()
    if not found:
        out.print("no artifacts" + (" of this kind" if args.type or args.name else " yet"))
        out.print(f"  {out.style('hint:', 'cyan')} steps artifacts add PATH")
        return 0
    rows = []
    for artifact in found:
        weight = size(sum(file.size for file in artifact.files)).rjust(8)
        created = time.strftime("%Y-%m-%d %H:%M", time.localtime(artifact.created))
        notes = [out.style(text, "dim") for text in (weight, created, _origin(artifact))]
        rows.append([artifact.ref, out.style(printable(artifact.type), "cyan"), *notes])
    out.table(rows)
    return 0


def show_artifacts(args: argparse.Namespace) -> int:
    """`steps artifacts show REF`."""
    from nemotron_steps.artifacts.integrity import place_of

    store = Session(args.home).store
    artifact = store.find(args.ref)
    place = place_of(store, artifact)
    if args.as_json:
        return print_json(_fields(artifact, store))
    out = Terminal.of()
    out.print(f"{out.style(artifact.ref, 'bold')}  {out.style(artifact.type, 'cyan')}")
    made = artifact.producer
    package = [("package", f"nemotron-steps {made.package}")] if made and made.package else []
    accepted = [("accepted", made.acceptance)] if made and made.accepted else []
    rows = [
        ("digest", artifact.digest),
        ("made by", _origin(artifact)),
        *package,
        *accepted,
        ("created", time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(artifact.created))),
        ("path", shown_path(place)),
        *(("input", f"{edge.port} = {edge.ref or edge.digest[:12]}") for edge in artifact.inputs),
        *sorted(artifact.attributes.items()),
    ]
    texts = [(name, str(value)) for name, value in rows]
    texts = [(name, text if name in _WHOLE or len(text) <= 80 else f"{text[:77]}...") for name, text in texts]
    out.table([[out.style(name, "dim"), printable(text)] for name, text in texts], indent=2)
    out.print(f"  {out.style(f'{len(artifact.files)} files', 'dim')}")
    out.table([[size(file.size).rjust(8), printable(file.path)] for file in artifact.files[:20]], indent=4)
    if len(artifact.files) > 20:
        out.print(f"    … {len(artifact.files) - 20} more")
    return 0


def lineage_artifacts(args: argparse.Namespace) -> int:
    """`steps artifacts lineage REF`: a tree of what it was made from, and what was made from it."""
    from nemotron_steps.artifacts.lineage import lineage

    store = Session(args.home).store
    found = lineage(store, store.find(args.ref))
    if args.as_json:
        return print_json(found.to_dict())
    out = Terminal.of()
    out.print(f"{out.style(found.of.ref, 'bold')}  {out.style(found.of.type, 'cyan')}")
    if found.accepted:
        out.print(f"  {out.style(printable(f'accepted {found.accepted}'), 'dim')}")
    out.tree(_ancestors(found, found.of.ref, out, {found.of.ref}))
    below = {link.child for link in found.descendants if link.parent == found.of.ref}
    if below:
        out.print()
        out.print(out.style("used by", "dim"))
        out.tree({name: {} for name in sorted(below)})
    return 0


def verify_artifacts(args: argparse.Namespace) -> int:
    """`steps artifacts verify [REF ...]`, of all there is without one: exit code 2 if anything is not as committed."""
    from nemotron_steps.artifacts.integrity import Hashed, Verified, problems, verify_home
    from nemotron_steps.runs.cache import verify_entries

    store = Session(args.home).store
    out = Terminal.of()
    hashed = Hashed()
    found = (store.find(ref) for ref in args.ref)
    looked_at = (Verified(each.ref, each.digest, tuple(problems(store, each, hashed))) for each in found)
    results = []
    failed = None
    for each in looked_at if args.ref else chain(verify_home(store), verify_entries(store)):
        results.append({"ref": each.ref, "digest": each.digest, "problems": [p.to_dict() for p in each.problems]})
        failed = failed or next(iter(each.problems), None)
        if args.as_json:
            continue
        mark = out.style("✗", "red") if each.problems else out.style("✓", "green")
        out.print(f"{mark} {printable(each.ref)}")
        for problem in each.problems:
            render(problem, out)
    if args.as_json:
        print_json(results)
    elif not results:
        out.print("no artifacts yet")
    return failed.exit_code if failed is not None else 0


def add_artifacts(args: argparse.Namespace) -> int:
    """`steps artifacts add PATH`."""
    session = Session(args.home)
    supertypes: tuple[str, ...] = ()
    if args.type is not None:
        supertypes = tuple(session.registry.types.ancestors(session.registry.type(args.type).name))
    artifact = session.store.add(
        Path(args.path).expanduser(), type_name=args.type, name=args.name, supertypes=supertypes
    )
    if args.as_json:
        return print_json(_fields(artifact, session.store))
    out = Terminal.of()
    out.print(f"{out.style(artifact.ref, 'bold')}  {out.style(artifact.type, 'cyan')}")
    out.print(f"  {out.style(f'--input PORT={artifact.ref}', 'cyan')}")
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


def _ancestors(found: Lineage, ref: str, out: Terminal, shown: set[str]) -> dict[str, Any]:
    """What a version was made from, as a tree; what two branches share is drawn below the first of them."""
    tree: dict[str, Any] = {}
    for link in found.ancestors:
        if link.child != ref:
            continue
        is_fresh = link.parent not in shown
        shown.add(link.parent)
        below = _ancestors(found, link.parent, out, shown) if is_fresh else {}
        repeated = not is_fresh and any(each.child == link.parent for each in found.ancestors)
        note = f"{link.port} of {link.step}" + (", see above" if repeated else "")
        note += f", accepted {link.accepted}" if link.accepted else ""
        tree[f"{link.parent}  {out.style(printable(note), 'dim')}"] = below
    return tree


def diff_artifacts(args: argparse.Namespace) -> int:
    """`steps artifacts diff A B`: exit code 0 if they hold the same, 1 if not."""
    from nemotron_steps.artifacts.compare import compare, config_changes
    from nemotron_steps.artifacts.files import plain
    from nemotron_steps.runs.cache import config_of

    store = Session(args.home).store
    found = compare(store, args.a, args.b)
    configs = [config_of(store, store.find(found[name]["ref"])) for name in ("a", "b")]
    config = None if None in configs else config_changes(configs[0] or {}, configs[1] or {})
    if args.as_json:
        print_json(plain({**found, "config": config}))
        return 0 if found["same"] else 1
    out = Terminal.of()
    verdict = ("the same", "green") if found["same"] else ("different", "yellow")
    names = printable(f"{found['a']['ref']} → {found['b']['ref']}")
    out.print(f"{out.style(names, 'bold')}  {out.style(verdict[0], verdict[1])}")
    _rows("attributes", found["attributes"], out)
    _rows("made from", found["inputs"], out)
    _rows("config", config or {}, out)
    files = found["files"].items()
    _rows("files", {path: [None if each is None else size(each) for each in pair] for path, pair in files}, out)
    return 0 if found["same"] else 1


def _rows(title: str, rows: Mapping[str, Any], out: Terminal) -> None:
    """Names with what each is in the first and in the second."""
    if rows:
        out.print(f"  {out.style(title, 'cyan')}")
        texts = {name: " → ".join("—" if each is None else str(each) for each in pair) for name, pair in rows.items()}
        lines = [[printable(name), printable(text)] for name, text in texts.items()]
        out.table(lines[:_SHOWN], indent=4)
        if len(lines) > _SHOWN:
            out.print(f"    … {len(lines) - _SHOWN} more (--json has all)")


def path_artifacts(args: argparse.Namespace) -> int:
    """`steps artifacts path REF`: a line with the folder."""
    from nemotron_steps.artifacts.backend import FsspecBackend

    store = Session(args.home).store
    artifact = store.find(args.ref)
    if isinstance(store.backend, FsspecBackend) and not artifact.location:
        hint = f"steps artifacts export {artifact.ref} DIR"
        raise RequestError("the home is not on this machine", where=store.backend.url, hints=(hint,))
    place = str(store.local_path(artifact))
    if args.as_json:
        return print_json({"ref": artifact.ref, "path": place})
    print(place)
    return 0


def export_artifacts(args: argparse.Namespace) -> int:
    """`steps artifacts export REF DIR [--hf]`."""
    from nemotron_steps.artifacts.export import export, free_folder

    session = Session(args.home)
    store = session.store
    artifact = store.find(args.ref)
    command = f"steps artifacts export {'--hf ' if args.hf else ''}{artifact.ref}"
    free_folder(artifact, Path(args.dir), command)
    if args.hf:
        from nemotron_steps.cli.run import shown, stdout_to_stderr
        from nemotron_steps.session.publish import hf_request
        from nemotron_steps.session.run import run_here

        request = hf_request(artifact, session.registry)
        if request is not None:
            with stdout_to_stderr() if args.as_json else nullcontext():
                display = partial(shown, request, None if args.as_json else Terminal.of())
                result, plan = run_here(session, request, display=display)
            (artifact,) = result.step(plan.goals[-1]).outputs.values()
    folder = str(export(store, artifact, Path(args.dir), command=command))
    hint = f"{command} {shlex.quote(folder)}-hf --hf   # for transformers, vLLM"
    hint = hint if artifact.type == "checkpoint_megatron" else ""
    return _taken(args, {"ref": artifact.ref, "digest": artifact.digest, "path": folder}, folder, hint)


def publish(args: argparse.Namespace) -> int:
    """`steps publish REF ORG/REPO`."""
    from huggingface_hub import get_token

    from nemotron_steps.artifacts.export import export
    from nemotron_steps.manifest.registry import load_registry
    from nemotron_steps.session.publish import is_model, model_card, upload

    store = Session(args.home).store
    artifact, repository = store.find(args.ref), args.repository
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", repository):
        raise RequestError("this is no repository of the hub", expected="ORG/REPO", found=repository)
    published = is_model(artifact.type, load_registry().types)
    if not published or artifact.type == "checkpoint_megatron":
        hint = _to_hf(artifact) if published else "steps artifacts list --type checkpoint_hf"
        what = "only a Hugging Face checkpoint or an adapter is published"
        raise RequestError(what, where=artifact.ref, found=artifact.type, hints=(hint,))
    card = model_card(store, artifact, repository, rows=args.rows)
    fields = {"ref": artifact.ref, "repository": repository}
    if args.folder is None and get_token():
        url = upload(store.open(artifact), card, repository, public=args.public)
        return _taken(args, {**fields, "url": url}, url)
    command = f"steps publish {artifact.ref} {repository} --folder"
    target = Path(args.folder or repository.replace("/", "--"))
    folder = str(export(store, artifact, target, card=card, command=command))
    hint = f"hf upload {repository} {shlex.quote(folder)} .{'' if args.public else ' --private'}"
    because = "" if args.folder else "   # there is no token (HF_TOKEN, `hf auth login`): nothing was uploaded"
    return _taken(args, {**fields, "folder": folder, "upload": hint}, folder, hint + because)


def _taken(args: argparse.Namespace, fields: dict[str, str], where: str, hint: str = "") -> int:
    if args.as_json:
        return print_json(fields)
    out = Terminal.of()
    out.print(f"{out.style(fields['ref'], 'bold')} → {printable(where)}")
    if hint:
        out.print(f"  {out.style('hint:', 'cyan')} {hint}")
    return 0


def _to_hf(artifact: Artifact) -> str:
    return f"steps run convert/megatron_to_hf --input checkpoint_megatron={artifact.ref}"


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
