"""The pages under reference/, written from what they are about when the site is built: steps from their manifests,
keys from the config models, types, commands from the parser, errors from their explanations.

A hook of mkdocs (mkdocs.yml).
"""

from __future__ import annotations

import inspect
import types
import typing
from argparse import Action, ArgumentParser, _SubParsersAction
from collections.abc import Iterator
from importlib import import_module

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from nemotron_steps.cli.catalog import config_files, explanations, purpose
from nemotron_steps.cli.parser import build
from nemotron_steps.environments.catalog import field_texts
from nemotron_steps.manifest.models import StepManifest
from nemotron_steps.manifest.packs import PackSearch, builtin_pack_root, open_pack
from nemotron_steps.manifest.registry import Registry, load_registry


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    for path, text in pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def pages() -> dict[str, str]:
    """Path below docs/ → Markdown."""
    registry = load_registry(PackSearch((open_pack(builtin_pack_root(), "nemotron_steps", "builtin"),)))
    made = {f"reference/steps/{step.id}.md": _step(step) for step in registry.steps.values()}
    made["reference/steps/index.md"] = _steps(registry)
    made["reference/types.md"] = _types(registry)
    made["reference/commands.md"] = _commands()
    made["reference/errors.md"] = _errors()
    return made


def _steps(registry: Registry) -> str:
    rows = [
        f"| [{step.id}]({step.id}.md) | {step.step.description} | {', '.join(port.type for port in step.produces)} |"
        for step in registry.steps.values()
    ]
    pipelines = [f"| {each.name} | {each.pipeline.description} |" for each in registry.pipelines.values()]
    steps = ["# Steps", "", "| step | what it does | makes |", "|---|---|---|", *rows, ""]
    return "\n".join([*steps, "## Pipelines", "", "| pipeline | what it is |", "|---|---|", *pipelines, ""])


def _step(step: StepManifest) -> str:
    lines = [f"# {step.id}", "", step.step.description, "", "## Ports", "", "| port | type | | |", "|---|---|---|---|"]
    for direction, ports in (("takes", step.consumes), ("makes", step.produces)):
        lines += [f"| {port.name} | {port.type} | {direction} | {_cell(port.description)} |" for port in ports]
    lines += ["", "## Configs", "", "| config | |", "|---|---|"]
    lines += [f"| `-c {path.stem}` | {_cell(purpose(path))} |" for path in config_files(step.file, step.id)]
    lines.append("")
    if step.parameters:
        lines += ["## Parameters worth knowing", "", "| key | default | |", "|---|---|---|"]
        lines += [f"| `{each.name}` | {_code(each.default)} | {_cell(each.description)} |" for each in step.parameters]
    if step.strategies:
        lines += ["", "## When it goes wrong", "", "| sign | what to do | overrides |", "|---|---|---|"]
        for each in step.strategies:
            pasted = " ".join(f"`{override}`" for override in each.override)
            lines.append(f"| {_cell(each.when)} | {_cell(each.then)} | {pasted} |")
    if step.step.config_schema:
        module, _, name = step.step.config_schema.partition(":")
        model = getattr(import_module(module), name)
        lines += ["", "## Every key", "", "| key | type | default | |", "|---|---|---|---|"]
        lines += [
            f"| `{key}` | {_cell(kind)} | {default} | {_cell(said)} |" for key, kind, default, said in _keys(model, "")
        ]
    return "\n".join([*lines, ""])


def _keys(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, str, str, str]]:
    """(dotted key, type, default, what it says) of every leaf of a config model."""
    said = field_texts(model)
    for name, field in model.model_fields.items():
        key = prefix + (field.alias or name)
        inner = _section_of(field.annotation)
        if inner is not None:
            yield from _keys(inner, f"{key}.")
            continue
        if field.default_factory is not None:
            default = "made"
        else:
            default = "**needed**" if field.default is PydanticUndefined else _code(field.default)
        yield key, _type_name(field.annotation), default, said.get(name, "")


def _section_of(annotation: object) -> type[BaseModel] | None:
    choices = [each for each in typing.get_args(annotation) if each is not type(None)] or [annotation]
    if len(choices) == 1 and inspect.isclass(choices[0]) and issubclass(choices[0], BaseModel):
        return choices[0]
    return None


def _type_name(annotation: object) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _type_name(arguments[0])
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_type_name(each) for each in arguments)
    if origin is typing.Literal:
        return ", ".join(map(str, arguments))
    if origin is not None:
        inside = ", ".join("…" if each is Ellipsis else _type_name(each) for each in arguments)
        return f"{getattr(origin, '__name__', origin)}[{inside}]"
    return "none" if annotation is type(None) else getattr(annotation, "__name__", str(annotation))


def _types(registry: Registry) -> str:
    lines = ["# Artifact types", "", "| type | may stand for | what it is |", "|---|---|---|"]
    for name, kind in sorted(registry.types.types.items()):
        lines.append(f"| {name} | {', '.join(kind.is_a)} | {_cell(kind.description)} |")
    return "\n".join([*lines, ""])


def _commands() -> str:
    lines = ["# Commands", "", "What `steps COMMAND --help` prints.", ""]
    for name, parser in _subcommands(build("steps"), "steps"):
        lines += [f"## {name}", "", "```", parser.format_help().rstrip(), "```", ""]
    return "\n".join(lines)


def _subcommands(parser: ArgumentParser, name: str) -> Iterator[tuple[str, ArgumentParser]]:
    actions: list[Action] = parser._actions
    inner = next((each for each in actions if isinstance(each, _SubParsersAction)), None)
    if inner is None:
        yield name, parser
        return
    for word, each in inner.choices.items():
        yield from _subcommands(each, f"{name} {word}")


def _errors() -> str:
    lines = ["# Errors", "", "`steps explain CODE` prints the same.", ""]
    for code, entry in explanations().items():
        lines += [f"## {code}: {entry['title']}", "", entry["cause"], "", f"*What mends it:* {entry['mend']}", ""]
        if "example" in entry:
            lines += ["```", entry["example"], "```", ""]
    return "\n".join(lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def _code(value: object) -> str:
    return "" if value is None else f"`{_cell(str(value))}`"
