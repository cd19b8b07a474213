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


def list_steps(arguments: argparse.Namespace) -> int:
    """`steps list`."""
    index = load_index()
    rows = selected(index, arguments.category, arguments.consumes, arguments.produces, arguments.tag)
    filtered = bool(arguments.category or arguments.consumes or arguments.produces or arguments.tag)
    pipelines = () if filtered else index.pipelines
    if arguments.as_json:
        print_json(
            {
                "steps": [row.to_dict() for row in rows],
                "pipelines": [row.to_dict() for row in pipelines],
                "problems": [problem.to_dict() for problem in index.problems],
            }
        )
        return 0
    terminal = Terminal.of()
    if not rows:
        terminal.print("no step matches")
    elif arguments.tree:
        terminal.tree(_tree(rows, terminal))
    else:
        _table(rows, terminal)
    if pipelines:
        terminal.print(terminal.style("pipelines", "dim"))
        terminal.table([[row.name, first_sentence(printable(row.description))] for row in pipelines], indent=2)
    _mention_problems(index, terminal)
    return 0


def selected(
    index: Index, category: str | None, consumes: str | None, produces: str | None, tags: Sequence[str]
) -> list[StepRow]:
    """Steps that match every filter given. UnknownNameError for an unknown type or category."""
    types = {port.type for row in index.steps for port in (*row.consumes, *row.produces)} | set(index.types.types)
    for option, name in (("consumes", consumes), ("produces", produces)):
        _known(name, types, f"--{option}", "artifact type")
    _known(category, {row.category for row in index.steps}, "--category", "category")
    rows = index.select(category=category, consumes=consumes, produces=produces)
    return [row for row in rows if set(tags) <= set(row.tags)]


def show(arguments: argparse.Namespace) -> int:
    """`steps show STEP`: the manifest as it is written, and the configs beside it."""
    index = load_index()
    if arguments.as_json:
        print_json(step_fields(index, arguments.step))
        return 0
    row, manifest, configs = _step(index, arguments.step)
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
    """What is about a step's manifest."""
    return [each for each in problems if (each.where or "").startswith(f"{row.file}:")]


def _step(index: Index, step_id: str) -> tuple[StepRow, dict[str, Any], list[Path]]:
    row = index.step(step_id)
    if row is None:
        if any(pipeline.name == step_id for pipeline in index.pipelines):
            raise UnknownNameError(
                f"'{step_id}' is a pipeline, not a step",
                expected="a step; a pipeline's stages are in its plan",
                hints=(f"steps plan {step_id}",),
            )
        raise _missing_step(step_id, index)
    import tomllib

    manifest = tomllib.loads(Path(row.file).read_text(encoding="utf-8"))
    return row, manifest, config_files(Path(row.file), row.plain_id)


def types(arguments: argparse.Namespace) -> int:
    """`steps types`: a tree of what is usable as what, with the conversions."""
    index = load_index()
    graph = index.types
    if arguments.as_json:
        print_json(type_fields(index))
        return 0
    terminal = Terminal.of()

    def below(parent: str | None) -> dict[str, Any]:
        children = [
            name
            for name, declared in sorted(graph.types.items())
            if (parent in declared.is_a if parent is not None else not declared.is_a)
        ]
        return {_type_label(name, index, terminal): below(name) for name in children}

    terminal.tree(below(None))
    _mention_problems(index, terminal)
    return 0


def type_fields(index: Index) -> dict[str, Any]:
    """Every artifact type by name: what it is, converts to, is made by and is read by."""
    graph = index.types
    return {
        name: {
            "description": declared.description,
            "is_a": list(declared.is_a),
            "convert_to": {hop.target: hop.step_id for hop in graph.conversions(name)},
            "attributes": dict(declared.attributes),
            "produced_by": [row.id for row in index.select(produces=name)],
            "consumed_by": [row.id for row in index.select(consumes=name)],
        }
        for name, declared in sorted(graph.types.items())
    }


def config_files(manifest: Path, step_id: str) -> list[Path]:
    """The configs of a step, found from where its manifest is, in either layout of a pack."""
    folders = [manifest.parent / "config"]
    folders += [parent.parent / "configs" / step_id for parent in manifest.parents if parent.name == "manifests"]
    return next((sorted(folder.glob("*.yaml")) for folder in folders if folder.is_dir()), [])


def purpose(config: Path) -> str:
    """What a config is for: the first sentence of the comment that it begins with; empty without one."""
    comment: list[str] = []
    with config.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if not line.startswith("#"):
                break
            if "@package" not in line:
                comment.append(line.lstrip("# ").strip())
    return first_sentence(" ".join(comment)) if comment else ""


def _table(rows: Iterable[StepRow], terminal: Terminal) -> None:
    by_category: dict[str, list[StepRow]] = {}
    for row in rows:
        by_category.setdefault(row.category or "other", []).append(row)
    width = max(len(row.id) for group in by_category.values() for row in group)
    for category in sorted(by_category):
        terminal.print(terminal.style(category, "dim"))
        terminal.table(
            [
                [
                    terminal.style(row.id.ljust(width), "bold"),
                    first_sentence(printable(row.description or row.name)),
                    terminal.style("→ " + ", ".join(port.type for port in row.produces), "dim") if row.produces else "",
                ]
                for row in by_category[category]
            ],
            indent=2,
            flexible=1,
        )


def _tree(rows: Iterable[StepRow], terminal: Terminal) -> dict[str, Any]:
    root: dict[str, Any] = {}
    for row in rows:
        node = root
        pack, colon, plain = row.id.rpartition(":")
        *parents, last = [pack + colon, *plain.split("/")] if colon else plain.split("/")
        for part in parents:
            node = node.setdefault(part, {})
        text = first_sentence(printable(row.description or row.name))
        node[f"{terminal.style(last, 'bold')}  {terminal.style(text, 'dim')}"] = {}
    return root


def _show_step(row: StepRow, manifest: Mapping[str, Any], configs: Sequence[Path], terminal: Terminal) -> None:
    def text(value: Any) -> str:
        return printable(" ".join(str(value).split()))

    def section(title: str, rows: list[list[str]]) -> None:
        if rows:
            terminal.print()
            terminal.print(terminal.style(title, "dim"))
            terminal.table(rows, indent=2)

    terminal.print(f"{terminal.style(row.id, 'bold')}  {text(row.name)}")
    terminal.wrap(text(row.description), indent=2)
    if not row.runnable:
        terminal.print(f"  {terminal.style('can be planned, not run: the manifest names no entry', 'yellow')}")
    for title, ports in (("consumes", manifest.get("consumes", ())), ("produces", manifest.get("produces", ()))):
        section(title, [_port(port, text, terminal) for port in ports])
    section(
        "parameters",
        [
            [text(entry["name"]), _default(entry), terminal.style(text(entry.get("description", "")), "dim")]
            for entry in manifest.get("parameters", ())
        ],
    )
    section("configs", [[path.stem, terminal.style(text(purpose(path)), "dim")] for path in configs])
    advice = [(entry["when"], entry["then"], entry.get("override", ())) for entry in manifest.get("strategies", ())]
    advice += [(entry["name"], entry["recovery"], entry.get("override", ())) for entry in manifest.get("errors", ())]
    if advice:
        terminal.print()
        terminal.print(terminal.style("advice", "dim"))
    for when, then, overrides in advice:
        terminal.print(f"  {text(when)}")
        terminal.wrap(text(then), indent=4)
        for override in (overrides,) if isinstance(overrides, str) else overrides:
            terminal.print(f"    {terminal.style(text(override), 'cyan')}")
    section(
        "about",
        [
            ["manifest", terminal.style(row.file, "dim")],
            *([["configs", terminal.style(str(configs[0].parent), "dim")]] if configs else []),
            ["tags", terminal.style(", ".join(row.tags), "dim")],
            *([key, terminal.style(text(value), "dim")] for key, value in manifest.get("resources", {}).items()),
            *([key, terminal.style(text(value), "dim")] for key, value in manifest.get("reference", {}).items()),
        ],
    )
    terminal.print()
    name = "tiny" if any(path.stem == "tiny" for path in configs) else "default"
    terminal.print(f"  {terminal.style(f'steps run {row.id} -c {name} --dry-run', 'cyan')}")


def _port(port: Mapping[str, Any], text: Any, terminal: Terminal) -> list[str]:
    bind = port.get("bind")
    keys = ", ".join([bind] if isinstance(bind, str) else bind or ())
    notes = [text(port.get("description", ""))]
    if port.get("required") is False:
        notes.insert(0, "optional:")
    label = port.get("name") or port["type"]
    where = terminal.style(f"[{keys}]", "dim") if keys else ""
    return [label, terminal.style(port["type"], "cyan"), f"{terminal.style(' '.join(notes), 'dim')}  {where}".rstrip()]


def _default(entry: Mapping[str, Any]) -> str:
    choices = entry.get("choices")
    shown = "" if entry.get("default") is None else _literal(entry["default"])
    return f"{shown} ({' | '.join(_literal(choice) for choice in choices)})" if choices else shown


def _literal(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else printable(str(value))


def _type_label(name: str, index: Index, terminal: Terminal) -> str:
    declared = index.types.types[name]
    hops = ", ".join(f"{hop.target} by {hop.step_id}" for hop in index.types.conversions(name))
    label = f"{terminal.style(name, 'bold')}  {terminal.style(first_sentence(printable(declared.description)), 'dim')}"
    return f"{label}  {terminal.style(f'converts to {hops}', 'cyan')}" if hops else label


def _known(name: str | None, known: Iterable[str], flag: str, kind: str) -> None:
    names = sorted(set(known))
    if name is None or name in names:
        return
    close = nearest(name, names)
    raise UnknownNameError(
        f"there is no {kind} '{name}'",
        where=f"{flag} {name}",
        expected=", ".join(names),
        hints=tuple(f"steps list {flag} {other}" for other in close) or (("steps types",) if "type" in kind else ()),
    )


def _missing_step(step_id: str, index: Index) -> Exception:
    """The error for a step that is not in the index: its own manifest's mistake if it has one, else near names."""
    from nemotron_steps.errors import StepsError

    if index.problems:
        from nemotron_steps.manifest.registry import load_registry

        try:
            load_registry().step(step_id)
        except StepsError as error:
            return error
    close = nearest(step_id, [row.id for row in index.steps])
    return UnknownNameError(
        f"there is no step '{step_id}'",
        expected="an id that `steps list` shows",
        hints=(*(f"steps show {name}" for name in close), "steps list"),
    )


def _mention_problems(index: Index, terminal: Terminal) -> None:
    if index.problems:
        count = len(index.problems)
        text = f"{count} manifest problem{'s' if count != 1 else ''}, not listed here:"
        Terminal.of(sys.stderr).print(f"{terminal.style(text, 'yellow')} steps doctor")


def explanations() -> dict[str, dict[str, str]]:
    """Code → title, cause, mend, and for most example, setup and then (nemotron_steps/errors/explanations.toml)."""
    return _explained("explanations.toml")


def explained_signals() -> dict[str, dict[str, Any]]:
    """Signal → title, cause, example (metric → its values, step by step), look and mend (errors/signals.toml)."""
    return _explained("signals.toml")


def explain(arguments: argparse.Namespace) -> int:
    """`steps explain [CODE|SIGNAL]`: one of them, or the titles of all."""
    codes, signals = explanations(), explained_signals()
    if arguments.code is None:
        return _list_explanations(codes, signals, as_json=arguments.as_json)
    name = arguments.code.removeprefix("error[").removesuffix("]")
    code, signal = name.upper(), name.lower().replace("-", "_")
    if code in codes:
        _show_explanation(code, codes[code], as_json=arguments.as_json)
    elif signal in signals:
        _show_explanation(signal, signals[signal], as_json=arguments.as_json)
    else:
        is_code = re.match(r"E\d", code)
        close = nearest(code, codes) if is_code else [each for each in signals if signal in each]
        close = close or nearest(signal, signals)
        raise UnknownNameError(
            f"there is no error and no signal '{arguments.code}'",
            expected="a code like E303, as it stands in error[E303], or a signal like kl_spike",
            found=arguments.code,
            hints=(*(f"steps explain {each}" for each in close[:2]), "steps explain"),
        )
    return 0


def _explained(name: str) -> dict[str, dict[str, Any]]:
    import tomllib
    from importlib.resources import files

    return tomllib.loads((files("nemotron_steps.errors") / name).read_text(encoding="utf-8"))


def _list_explanations(
    codes: Mapping[str, Mapping[str, Any]], signals: Mapping[str, Mapping[str, Any]], *, as_json: bool
) -> int:
    if as_json:
        return print_json([{"code": code, **entry} for code, entry in {**codes, **signals}.items()])
    terminal = Terminal.of()
    for title, entries in (("errors", codes), ("signals of a training run", signals)):
        terminal.print(terminal.style(title, "dim"))
        terminal.table([[terminal.style(name, "bold"), entry["title"]] for name, entry in entries.items()], indent=2)
    return 0


def _show_explanation(name: str, entry: Mapping[str, Any], *, as_json: bool) -> None:
    advice = _advice_against(name)
    if as_json:
        print_json({"code": name, **entry, **({"advice": advice} if advice else {})})
        return
    terminal = Terminal.of()
    terminal.print(f"{terminal.style(name, 'bold')}  {entry['title']}")
    terminal.print()
    terminal.wrap(entry["cause"])
    if "example" in entry:
        terminal.print()
        terminal.print(terminal.style("For example", "dim"))
        for line in _example(entry):
            terminal.print(f"  {line.encode('unicode_escape').decode()}")
    if "look" in entry:
        terminal.print()
        terminal.print(terminal.style("Where to look", "dim"))
        terminal.wrap(entry["look"], indent=2)
    terminal.print()
    terminal.print(terminal.style("What mends it", "dim"))
    terminal.wrap(entry["mend"], indent=2)
    if "then" in entry:
        terminal.print(f"  {terminal.style(entry['then'], 'cyan')}")
    for overrides, steps in advice.items():
        terminal.print(f"  {terminal.style(overrides, 'cyan')}   # {', '.join(steps)}")


def _example(entry: Mapping[str, Any]) -> list[str]:
    """The lines of an example: commands, or metrics step by step."""
    example = entry["example"]
    if isinstance(example, str):
        return [line for line in (entry.get("setup"), example) if line is not None]
    return [f"{metric}: {values}" for metric, values in example.items()]


def _advice_against(signal: str) -> dict[str, list[str]]:
    """What manifests advise against a signal: overrides → the steps that have them."""
    if signal not in explained_signals():
        return {}
    from nemotron_steps.manifest.registry import load_registry

    found: dict[str, list[str]] = {}
    for step_id, manifest in load_registry().steps.items():
        answers = [strategy for strategy in manifest.strategies if signal in strategy.signal and strategy.override]
        if answers:
            found.setdefault(" ".join(text for each in answers for text in each.overrides_for({})), []).append(step_id)
    return found
