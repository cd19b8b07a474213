"""`steps new KIND NAME`: a package one can install, with a step, environment, executor, type or pipeline that works, of
templates/KIND/*.tmpl, with `@field@` for what differs."""

from __future__ import annotations

import keyword
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from nemotron_steps.cli.errors import print_json
from nemotron_steps.cli.terminal import Terminal
from nemotron_steps.errors import RequestError
from nemotron_steps.session.jobs import shown_path
from nemotron_steps.session.run_request import UsageError

if TYPE_CHECKING:
    import argparse

_TEMPLATES = Path(__file__).parent / "templates"
_STEP_ID = re.compile(r"[a-z0-9][a-z0-9_.-]*(/[a-z0-9][a-z0-9_.-]*)*")
_NAME = re.compile(r"[a-z][a-z0-9_]*")


_PACKS = "nemotron_steps.packs"
_PLACES = {
    "manifest.toml": "@package@/pack/manifests/@name@.toml",
    "default.yaml": "@package@/pack/configs/@name@/default.yaml",
    "tiny.yaml": "@package@/pack/configs/@name@/tiny.yaml",
    "types.toml": "@package@/pack/manifests/@name@/types.toml",
    "pipeline.toml": "@package@/pack/manifests/pipelines/@name@.toml",
    "module.py": "@package@/@module@.py",
    "test.py": "tests/test_@module@.py",
    "rows.jsonl": "tests/@module@_rows.jsonl",
}


KINDS: Mapping[str, tuple[str, str]] = {
    "step": ("steps run @name@ --input rows=FILE.jsonl", _PACKS),
    "environment": ("steps env show @name@", "nemotron_steps.environments"),
    "executor": ("steps run STEP -b PROFILE   # of env.toml, with executor = '@name@'", "nemotron_steps.executors"),
    "type": ("steps artifacts add PATH --type @name@", _PACKS),
    "pipeline": ("steps plan @name@ -c tiny", _PACKS),
}
"""What `steps new` can write: a command to paste once it is installed, and the entry points that announce it."""


def new(args: argparse.Namespace) -> int:
    """`steps new`."""
    words = args.what
    if len(words) == 1 and words[0] not in KINDS:
        words = ["step", *words]
    if len(words) != 2 or words[0] not in KINDS:
        raise UsageError(
            "say what to write, and its name",
            expected=f"steps new [{'|'.join(KINDS)}] NAME",
            found=" ".join(words),
            hints=("steps new step acme/filter_prompts", "steps new environment acme_lookup"),
        )
    kind, name = words
    if kind == "step" and not _STEP_ID.fullmatch(name):
        raise RequestError(
            f"'{name}' is not a step id",
            expected="lower-case parts with slashes between them, like data_prep/my_prep",
            hints=("steps new data_prep/my_prep",),
        )
    if kind != "step" and not _NAME.fullmatch(name):
        raise RequestError(
            f"'{name}' cannot name this {kind}",
            expected="lower-case letters, digits and _",
            hints=(f"steps new {kind} {_identifier(name)}",),
        )
    root = Path(args.into or "steps_pack")
    written = write(root, kind, name)
    if args.as_json:
        return print_json({kind: name, "pack": str(root), "files": [str(path) for path in written]})
    out = Terminal.of()
    place = shown_path(root)
    out.print(f"{out.style(name, 'bold')} in {place}")
    for path in written:
        out.print(f"  {out.style('+', 'green')} {path.relative_to(root)}")
    install = place if str(root).startswith(("/", ".")) else f"./{place}"
    commands = {
        f"pip install -e '{install}[test]'": f"   # makes the {kind} known everywhere",
        f"pytest {place}": "   # runs its checks",
        **({f"steps show {name}": ""} if kind == "step" else {}),
        _filled(KINDS[kind][0], _fields(kind, name, root)): "",
    }
    out.print()
    for command, comment in commands.items():
        out.print(f"  {out.style(command, 'cyan')}{out.style(comment, 'dim')}")
    return 0


def write(root: Path, kind: str, name: str) -> list[Path]:
    """Write one thing into the package at `root`, making the package if it is not there. Returns the new files."""
    fields = _fields(kind, name, root)
    pyproject = root / "pyproject.toml"
    if root.exists() and any(root.iterdir()) and not pyproject.is_file():
        raise RequestError(
            f"'{root}' is not empty and not a pack",
            expected="a new folder, or one that `steps new` made",
            hints=(f"steps new {kind} {name} --into OTHER",),
        )
    templates = sorted((_TEMPLATES / kind).glob("*.tmpl"))
    files = {root / _filled(_PLACES[each.stem], fields): each for each in templates}
    taken = [path for path in files if path.exists()]
    if taken:
        raise RequestError(f"this would overwrite '{taken[0]}'", hints=("choose another name or folder",))
    shared = {pyproject: _TEMPLATES / "pyproject.toml.tmpl", root / fields["package"] / "__init__.py": None}
    written = []
    for path, template in {**shared, **files}.items():
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            text = template.read_text("utf-8") if template is not None else '"""A pack."""\n'
            path.write_text(_filled(text, fields), encoding="utf-8")
            written.append(path)
    group, package = KINDS[kind][1], fields["package"]
    point = (package, f"{package}:pack")
    if group != _PACKS:
        point = (name, f"{package}.{fields['module']}:{fields['class_name']}")
    text = pyproject.read_text("utf-8")
    pyproject.write_text(with_entry_point(text, group, *point), encoding="utf-8")
    return written


def with_entry_point(text: str, group: str, name: str, value: str) -> str:
    """The text of a pyproject.toml with an entry point in it, at the begin of its group where there is one."""
    known = tomllib.loads(text).get("project", {}).get("entry-points", {}).get(group, {})
    if name in known:
        if known[name] != value:
            raise RequestError(f"pyproject.toml announces another '{name}'", where=group, found=known[name])
        return text
    line, header = f'{name} = "{value}"\n', f'[project.entry-points."{group}"]\n'
    if header in text:
        return text.replace(header, header + line)
    before, table, after = text.partition("[tool.")
    return f"{before.rstrip()}\n\n{header}{line}\n{table}{after}" if table else f"{text.rstrip()}\n\n{header}{line}"


def _fields(kind: str, name: str, root: Path) -> dict[str, str]:
    package = _identifier(root.resolve().name)
    module = _identifier(name.rsplit("/", 1)[-1])
    suffix = "Config" if kind == "step" else ""
    return {
        "name": name,
        "step_id": name,
        "package": package,
        "module": module,
        "class_name": _importable("".join(map(str.capitalize, module.split("_"))) + suffix),
        "category": name.split("/", 1)[0] if "/" in name else "data_prep",
        "distribution": package.replace("_", "-"),
    }


def _filled(text: str, fields: Mapping[str, str]) -> str:
    for name, value in fields.items():
        text = text.replace(f"@{name}@", value)
    return text


def _identifier(text: str) -> str:
    name = re.sub(r"\W+", "_", text).strip("_").lower() or "step"
    return _importable(name)


def _importable(name: str) -> str:
    """The name where Python takes it as one; else with an underscore before it."""
    return f"_{name}" if name[0].isdigit() or keyword.iskeyword(name) else name
