"""`steps list`, `show`, `types`, from the cached index, without pydantic, in under 100 ms; `steps explain`."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemotron_steps.cli.errors import print_json, render
from nemotron_steps.cli.terminal import Terminal, first_sentence
from nemotron_steps.config.names import nearest
from nemotron_steps.errors import ManifestError, UnknownNameError
from nemotron_steps.manifest.index import Index, StepRow, load_index
from nemotron_steps.session.jobs import printable

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Mapping, Sequence


def list_steps(args: argparse.Namespace) -> int:
    """`steps list`."""
    index = load_index()
    filters = (args.category, args.consumes, args.produces, args.tag)
    rows = selected(index, *filters)
    pipelines = () if any(filters) else index.pipelines
    if args.as_json:
        named: dict[str, Sequence[Any]] = {"steps": rows, "pipelines": pipelines, "problems": index.problems}
        return print_json({name: [each.to_dict() for each in found] for name, found in named.items()})
    out = Terminal.of()
    if not rows:
        out.print("no step matches")
    else:
        _table(rows, out)
    if pipelines:
        out.print(out.style("pipelines", "dim"))
        out.table([[row.name, first_sentence(printable(row.description))] for row in pipelines], indent=2)
    _mention_problems(index, out)
    return 0


def selected(
    index: Index, category: str | None, consumes: str | None, produces: str | None, tags: Sequence[str]
) -> list[StepRow]:
    """Steps that match every filter given. UnknownNameError for an unknown type or category."""
    types = {port.type for row in index.steps for port in (*row.consumes, *row.produces)} | set(index.types.types)
    _known(consumes, types, "--consumes", "artifact type")
    _known(produces, types, "--produces", "artifact type")
    _known(category, {row.category for row in index.steps}, "--category", "category")
    rows = index.select(category=category, consumes=consumes, produces=produces)
    return [row for row in rows if set(tags) <= set(row.tags)]


def _known(name: str | None, known: set[str], flag: str, kind: str) -> None:
    if name is not None and name not in known:
        raise UnknownNameError(
            f"there is no {kind} '{name}'",
            where=f"{flag} {name}",
            expected=", ".join(sorted(known)),
            hints=[f"steps list {flag} {other}" for other in nearest(name, sorted(known))] or ["steps list"],
        )


def show(args: argparse.Namespace) -> int:
    """`steps show STEP`: the manifest as it is written, and the configs beside it."""
    index = load_index()
    if args.as_json:
        return print_json(step_fields(index, args.step))
    row, manifest, configs = _step(index, args.step)
    _show_step(row, manifest, configs, Terminal.of())
    errors = Terminal.of(sys.stderr)
    for warning in _about(row, index.warnings):
        errors.print(f"{errors.style('note:', 'yellow')} {printable(f'{warning.what} ({warning.where})')}")
    for problem in _about(row, index.problems):
        render(problem, errors)
    return 0


def step_fields(index: Index, step_id: str) -> dict[str, Any]:
    """A step's row, its configs by name and its manifest as it is written. UnknownNameError with near ids."""
    row, manifest, configs = _step(index, step_id)
    problems = [problem.to_dict() for problem in _about(row, index.problems)]
    fields = {**row.to_dict(), "configs": {path.stem: str(path) for path in configs}, "manifest": manifest}
    return {**fields, "problems": problems} if problems else fields


def _about(row: StepRow, problems: Iterable[ManifestError]) -> list[ManifestError]:
    return [each for each in problems if (each.where or "").startswith(f"{row.file}:")]


def _step(index: Index, step_id: str) -> tuple[StepRow, dict[str, Any], list[Path]]:
    row = index.step(step_id)
    if row is None and any(pipeline.name == step_id for pipeline in index.pipelines):
        raise UnknownNameError(
            f"'{step_id}' is a pipeline, not a step",
            expected="a step; a pipeline's stages are in its plan",
            hints=(f"steps plan {step_id}",),
        )
    if row is None and index.problems:
        from nemotron_steps.manifest.registry import load_registry

        load_registry().step(step_id)  # raises what is wrong with its manifest
    if row is None:
        close = nearest(step_id, [row.id for row in index.steps])
        raise UnknownNameError(
            f"there is no step '{step_id}'",
            expected="an id that `steps list` shows",
            hints=(*(f"steps show {name}" for name in close), "steps list"),
        )
    import tomllib

    manifest = tomllib.loads(Path(row.file).read_text(encoding="utf-8"))
    return row, manifest, config_files(Path(row.file), row.plain_id)


def types(args: argparse.Namespace) -> int:
    """`steps types`: what is usable as what, with the conversions."""
    index = load_index()
    if args.as_json:
        return print_json(type_fields(index))
    out = Terminal.of()

    rows = []
    for name, declared in sorted(index.types.types.items()):
        hops = ", ".join(f"{hop.target} by {hop.step_id}" for hop in index.types.conversions(name))
        used = ", ".join([*(f"is a {parent}" for parent in declared.is_a), *([f"converts to {hops}"] if hops else [])])
        text = first_sentence(printable(declared.description))
        rows.append([out.style(name, "bold"), text, out.style(used, "cyan")])
    out.table(rows, flexible=1)
    _mention_problems(index, out)
    return 0


def type_fields(index: Index) -> dict[str, Any]:
    """Every artifact type by name: what it is, converts to, is made by and is read by."""
    return {
        name: {
            "description": declared.description,
            "is_a": list(declared.is_a),
            "convert_to": {hop.target: hop.step_id for hop in index.types.conversions(name)},
            "attributes": dict(declared.attributes),
            "produced_by": [row.id for row in index.select(produces=name)],
            "consumed_by": [row.id for row in index.select(consumes=name)],
        }
        for name, declared in sorted(index.types.types.items())
    }


def config_files(manifest: Path, step_id: str) -> list[Path]:
    """The configs of a step, found from where its manifest is, in either layout of a pack."""
    folders = [manifest.parent / "config"]
    folders += [parent.parent / "configs" / step_id for parent in manifest.parents if parent.name == "manifests"]
    return next((sorted(folder.glob("*.yaml")) for folder in folders if folder.is_dir()), [])


def purpose(config: Path) -> str:
    """What a config is for: the first sentence of the comment that it begins with; empty without one."""
    head = re.match(r"(#.*\n)*", config.read_text(encoding="utf-8", errors="replace"))
    comment = [line.lstrip("# ").strip() for line in head[0].splitlines() if "@package" not in line] if head else []
    return first_sentence(" ".join(comment))


def _table(rows: Sequence[StepRow], out: Terminal) -> None:
    width = max(len(row.id) for row in rows)
    for category in sorted({row.category or "other" for row in rows}):
        out.print(out.style(category, "dim"))
        table = []
        for row in rows:
            if (row.category or "other") == category:
                made = "→ " + ", ".join(port.type for port in row.produces) if row.produces else ""
                text = first_sentence(printable(row.description or row.name))
                table.append([out.style(row.id.ljust(width), "bold"), text, out.style(made, "dim")])
        out.table(table, indent=2, flexible=1)


def _show_step(row: StepRow, manifest: Mapping[str, Any], configs: Sequence[Path], out: Terminal) -> None:
    def text(value: Any) -> str:
        return printable(" ".join(str(value).split()))

    def dim(value: Any) -> str:
        return out.style(text(value), "dim")

    also = f"also {', '.join(row.aliases)}" if row.aliases else ""
    out.print(f"{out.style(row.id, 'bold')}  {text(row.name)}  {dim(also)}".rstrip())
    out.wrap(text(row.description), indent=2)
    if not row.runnable:
        out.print(f"  {out.style('can be planned, not run: the manifest names no entry', 'yellow')}")
    sections: dict[str, list[list[str]]] = {"consumes": [], "produces": []}
    for title, ports in sections.items():
        for port in manifest.get(title, ()):
            bind = port.get("bind") or ()
            keys = ", ".join([bind] if isinstance(bind, str) else bind)
            note = ("optional: " if port.get("required") is False else "") + text(port.get("description", ""))
            where = out.style(f"[{keys}]", "dim") if keys else ""
            kind = out.style(port["type"], "cyan")
            ports.append([port.get("name") or port["type"], kind, f"{dim(note)}  {where}".rstrip()])
    described = manifest.get("parameters", ())
    sections["parameters"] = [[text(p["name"]), _default(p), dim(p.get("description", ""))] for p in described]
    sections["configs"] = [[path.stem, dim(purpose(path))] for path in configs]
    for title, rows in sections.items():
        if rows:
            out.print(f"\n{out.style(title, 'dim')}")
            out.table(rows, indent=2)
    advice = [(entry["when"], entry["then"], entry.get("override", ())) for entry in manifest.get("strategies", ())]
    advice += [(entry["name"], entry["recovery"], entry.get("override", ())) for entry in manifest.get("errors", ())]
    if advice:
        out.print(f"\n{out.style('advice', 'dim')}")
    for when, then, overrides in advice:
        out.print(f"  {text(when)}")
        out.wrap(text(then), indent=4)
        for override in (overrides,) if isinstance(overrides, str) else overrides:
            out.print(f"    {out.style(text(override), 'cyan')}")
    places = {"configs": configs[0].parent} if configs else {}
    about = {"manifest": row.file, **places, "tags": ", ".join(row.tags)}
    about |= {**manifest.get("resources", {}), **manifest.get("reference", {})}
    out.print(f"\n{out.style('about', 'dim')}")
    out.table([[key, dim(value)] for key, value in about.items()], indent=2)
    name = "tiny" if any(path.stem == "tiny" for path in configs) else "default"
    out.print(f"\n  {out.style(f'steps run {row.id} -c {name} --dry-run', 'cyan')}")


def _default(entry: Mapping[str, Any]) -> str:
    def literal(value: Any) -> str:
        return str(value).lower() if isinstance(value, bool) else printable(str(value))

    shown = "" if entry.get("default") is None else literal(entry["default"])
    choices = " | ".join(map(literal, entry.get("choices") or ()))
    return f"{shown} ({choices})" if choices else shown


def _mention_problems(index: Index, out: Terminal) -> None:
    if index.problems:
        count = len(index.problems)
        text = f"{count} manifest problem{'s' if count != 1 else ''}, not listed here:"
        Terminal.of(sys.stderr).print(f"{out.style(text, 'yellow')} steps doctor")


def explanations() -> dict[str, dict[str, str]]:
    """Code → title, cause, mend, and for many an example (nemotron_steps/errors/explanations.toml)."""
    return _explained("explanations.toml")


def explained_signals() -> dict[str, dict[str, Any]]:
    """Signal → title, cause, example (metric → its values, step by step), look and mend (errors/signals.toml)."""
    return _explained("signals.toml")


def _explained(name: str) -> dict[str, dict[str, Any]]:
    import tomllib
    from importlib.resources import files

    return tomllib.loads((files("nemotron_steps.errors") / name).read_text(encoding="utf-8"))


def explain(args: argparse.Namespace) -> int:
    """`steps explain [CODE|SIGNAL]`: one of them, or the titles of all."""
    codes, signals = explanations(), explained_signals()
    if args.code is None:
        if args.as_json:
            return print_json([{"code": code, **entry} for code, entry in {**codes, **signals}.items()])
        out = Terminal.of()
        for title, entries in (("errors", codes), ("signals of a training run", signals)):
            out.print(out.style(title, "dim"))
            rows = [[out.style(name, "bold"), entry["title"]] for name, entry in entries.items()]
            out.table(rows, indent=2)
        return 0
    name = args.code.removeprefix("error[").removesuffix("]")
    code, signal = name.upper(), name.lower().replace("-", "_")
    if code in codes:
        return _show_explanation(code, codes[code], as_json=args.as_json)
    if signal in signals:
        return _show_explanation(signal, signals[signal], as_json=args.as_json)
    close = nearest(code, codes) if re.match(r"E\d", code) else [each for each in signals if signal in each]
    close = close or nearest(signal, signals)
    raise UnknownNameError(
        f"there is no error and no signal '{args.code}'",
        expected="a code like E303, as it stands in error[E303], or a signal like kl_spike",
        found=args.code,
        hints=(*(f"steps explain {each}" for each in close[:2]), "steps explain"),
    )


def _show_explanation(name: str, entry: Mapping[str, Any], *, as_json: bool) -> int:
    if as_json:
        return print_json({"code": name, **entry})
    out = Terminal.of()
    out.print(f"{out.style(name, 'bold')}  {entry['title']}\n")
    out.wrap(entry["cause"])
    example = entry.get("example")
    if example is not None:
        out.print(f"\n{out.style('For example', 'dim')}")
        metrics = [f"{metric}: {values}" for metric, values in example.items()] if isinstance(example, dict) else None
        for line in metrics or [example]:
            out.print(f"  {line}")
    if "look" in entry:
        out.print(f"\n{out.style('Where to look', 'dim')}")
        out.wrap(entry["look"], indent=2)
    out.print(f"\n{out.style('What mends it', 'dim')}")
    out.wrap(entry["mend"], indent=2)
    return 0
