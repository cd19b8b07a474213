"""`steps new KIND NAME`: a package one can install, with a step, environment, executor, type or pipeline that works.

What it writes is small and real, and its test is one line of the conformance kit (`nemotron_steps.testing`): green as
it is, and red when a change breaks a rule. The files are templates/KIND/*.tmpl, with `@field@` for what differs.
"""

from __future__ import annotations

import keyword
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nemotron_steps.cli.errors import print_json
from nemotron_steps.cli.terminal import Terminal
from nemotron_steps.errors import RequestError
from nemotron_steps.manifest.index import load_index
from nemotron_steps.session.jobs import shown_path
from nemotron_steps.session.run_request import UsageError

if TYPE_CHECKING:
    import argparse

_TEMPLATES = Path(__file__).parent / "templates"
_STEP_ID = re.compile(r"[a-z0-9][a-z0-9_.-]*(/[a-z0-9][a-z0-9_.-]*)*")
_NAME = re.compile(r"[a-z][a-z0-9_]*")
_DEFAULT_FOLDER = "steps_pack"


@dataclass(frozen=True)
class Kind:
    """What `steps new` can write.

    Attributes:
        files: path in the package → template.
        group, value: the entry point that announces it.
        try_it: a command to paste once it is installed.
    """

    files: Mapping[str, str]
    group: str = "nemotron_steps.packs"
    point: str = "@package@"
    value: str = "@package@:pack"
    try_it: str = ""
    suffix: str = ""


KINDS: Mapping[str, Kind] = {
    "step": Kind(
        {
            "@package@/pack/manifests/@name@.toml": "step/manifest.toml",
            "@package@/pack/configs/@name@/default.yaml": "step/default.yaml",
            "@package@/pack/configs/@name@/tiny.yaml": "step/tiny.yaml",
            "@package@/@module@.py": "step/module.py",
            "tests/test_@module@.py": "step/test.py",
        },
        try_it="steps run @name@ --input rows=FILE.jsonl",
        suffix="Config",
    ),
    "environment": Kind(
        {
            "@package@/@module@.py": "environment/module.py",
            "tests/test_@module@.py": "environment/test.py",
            "tests/@module@_rows.jsonl": "environment/rows.jsonl",
        },
        group="nemotron_steps.environments",
        point="@name@",
        value="@package@.@module@:@class_name@",
        try_it="steps env show @name@",
    ),
    "executor": Kind(
        {"@package@/@module@.py": "executor/module.py", "tests/test_@module@.py": "executor/test.py"},
        group="nemotron_steps.executors",
        point="@name@",
        value="@package@.@module@:@class_name@",
        try_it="steps run STEP -b PROFILE   # of env.toml, with executor = '@name@'",
    ),
    "type": Kind(
        {
            "@package@/pack/manifests/@name@/types.toml": "type/types.toml",
            "@package@/@module@.py": "type/module.py",
            "tests/test_@module@.py": "type/test.py",
        },
        try_it="steps artifacts add PATH --type @name@",
    ),
    "pipeline": Kind(
        {
            "@package@/pack/manifests/pipelines/@name@.toml": "pipeline/pipeline.toml",
            "tests/test_@module@.py": "pipeline/test.py",
        },
        try_it="steps plan @name@ -c tiny",
    ),
}


def new(arguments: argparse.Namespace) -> int:
    """`steps new`."""
    kind, name = _kind_and_name(arguments.what)
    _require_name(kind, name)
    root = Path(arguments.into or _DEFAULT_FOLDER)
    _require_free(kind, name, root)
    written = write(root, kind, name)
    if arguments.as_json:
        return print_json({kind: name, "pack": str(root), "files": [str(path) for path in written]})
    terminal = Terminal.of()
    terminal.print(f"{terminal.style(name, 'bold')} in {shown_path(root)}")
    for path in written:
        terminal.print(f"  {terminal.style('+', 'green')} {path.relative_to(root)}")
    terminal.print()
    install = shown_path(root) if str(root).startswith(("/", ".")) else f"./{shown_path(root)}"
    for command, purpose in (
        (f"pip install -e '{install}[test]'", f"makes the {kind} known everywhere"),
        (f"pytest {shown_path(root)}", "runs its checks"),
        *([(f"steps show {name}", "")] if kind == "step" else []),
        (_filled(KINDS[kind].try_it, _fields(kind, name, root)), ""),
    ):
        comment = terminal.style(f"   # {purpose}", "dim") if purpose else ""
        terminal.print(f"  {terminal.style(command, 'cyan')}{comment}")
    return 0


def _kind_and_name(words: list[str]) -> tuple[str, str]:
    """A name alone is a step's."""
    if len(words) == 1 and words[0] not in KINDS:
        return "step", words[0]
    if len(words) == 2 and words[0] in KINDS:
        return words[0], words[1]
    raise UsageError(
        "say what to write, and its name",
        expected=f"steps new [{'|'.join(KINDS)}] NAME",
        found=" ".join(words),
        hints=("steps new step acme/filter_prompts", "steps new environment acme_lookup"),
    )


def _require_name(kind: str, name: str) -> None:
    if kind == "step" and not _STEP_ID.fullmatch(name):
        raise RequestError(
            f"'{name}' is not a step id",
            expected="lower-case parts with slashes between them, like data_prep/my_prep",
            hints=("steps new data_prep/my_prep",),
        )
    if kind != "step" and not _NAME.fullmatch(name):
        raise RequestError(
            f"'{name}' cannot name {'an' if kind[0] in 'aeio' else 'a'} {kind}",
            expected="lower-case letters, digits and _",
            hints=(f"steps new {kind} {_identifier(name)}",),
        )


def _require_free(kind: str, name: str, root: Path) -> None:
    """Refuse a name that something else has already."""
    where = None
    if kind == "environment":
        from nemotron_steps.environments.registry import BUILT_IN

        where = BUILT_IN.get(name)
    elif kind == "executor":
        from nemotron_steps.runs.executors.base import executor_names

        where = "an installed executor" if name in executor_names() else None
    else:
        index = load_index()
        if kind == "step":
            where = next((row.file for row in index.steps if row.id == name), None)
        elif kind == "pipeline":
            where = next((row.file for row in index.pipelines if row.name == name), None)
        elif name in index.types:
            where = index.types.types[name].where
    if where is not None and root.resolve() not in Path(where).resolve().parents:
        article = "an" if kind[0] in "aeio" else "a"
        raise RequestError(
            f"there is {article} {kind} '{name}' already",
            where=where,
            expected="a name of its own",
            hints=(f"steps new {kind} {name}_mine",),
        )


def write(root: Path, kind: str, name: str) -> list[Path]:
    """Write one thing into the package at `root`, making the package if it is not there. Returns the new files.

    Raises:
        RequestError: the package has that already, or the folder is something else.
    """
    fields = _fields(kind, name, root)
    pyproject = root / "pyproject.toml"
    if root.exists() and any(root.iterdir()) and not pyproject.is_file():
        raise RequestError(
            f"'{root}' is not empty and not a pack",
            expected="a new folder, or one that `steps new` made",
            hints=(f"steps new {kind} {name} --into OTHER",),
        )
    files = {root / _filled(path, fields): template for path, template in KINDS[kind].files.items()}
    taken = [path for path in files if path.exists()]
    if taken:
        raise RequestError(f"this would overwrite '{taken[0]}'", hints=("choose another name or folder",))
    shared = {pyproject: "pyproject.toml", root / fields["package"] / "__init__.py": ""}
    written = []
    for path, template in {**shared, **files}.items():
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            text = (_TEMPLATES / f"{template}.tmpl").read_text("utf-8") if template else '"""A pack."""\n'
            path.write_text(_filled(text, fields), encoding="utf-8")
            written.append(path)
    group, point, value = (_filled(text, fields) for text in (KINDS[kind].group, KINDS[kind].point, KINDS[kind].value))
    text = pyproject.read_text("utf-8")
    pyproject.write_text(with_entry_point(text, group, point, value), encoding="utf-8")
    return written


def with_entry_point(text: str, group: str, name: str, value: str) -> str:
    """The text of a pyproject.toml with an entry point in it, at the end of its group where there is one.

    Raises:
        RequestError: the group announces another thing by that name.
    """
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
    return {
        "name": name,
        "step_id": name,
        "package": package,
        "module": module,
        "class_name": _importable("".join(map(str.capitalize, module.split("_"))) + KINDS[kind].suffix),
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
