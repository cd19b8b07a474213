"""`steps new STEP`: a pack one can install, with a manifest, a config, a step function and a test that passes.

The step it writes copies a JSON Lines data set without its longest rows: small, real, and with every part a step has.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from nemotron_steps.cli.errors import print_json
from nemotron_steps.cli.summary import shown_path
from nemotron_steps.cli.terminal import Terminal
from nemotron_steps.errors import RequestError
from nemotron_steps.manifest.index import load_index

if TYPE_CHECKING:
    import argparse

_STEP_ID = re.compile(r"[a-z0-9][a-z0-9_.-]*(/[a-z0-9][a-z0-9_.-]*)*")
_DEFAULT_FOLDER = "steps_pack"


def new(arguments: argparse.Namespace) -> int:
    """`steps new`."""
    step_id: str = arguments.step
    if not _STEP_ID.fullmatch(step_id):
        raise RequestError(
            f"'{step_id}' is no step id",
            expected="lower-case parts with slashes between them, like data_prep/my_prep",
            hints=("steps new data_prep/my_prep",),
        )
    root = Path(arguments.into or _DEFAULT_FOLDER)
    manifest = next((row.file for row in load_index().steps if row.id == step_id), None)
    if manifest is not None and root.resolve() not in Path(manifest).resolve().parents:
        raise RequestError(
            f"there is a step '{step_id}' already",
            where=manifest,
            expected="an id of its own",
            hints=(f"steps new {step_id}_mine",),
        )
    written = write_step(root, step_id)
    if arguments.as_json:
        print_json({"step": step_id, "pack": str(root), "files": [str(path) for path in written]})
        return 0
    terminal = Terminal.of()
    terminal.print(f"{terminal.style(step_id, 'bold')} in {shown_path(root)}")
    for path in written:
        terminal.print(f"  {terminal.style('+', 'green')} {path.relative_to(root)}")
    terminal.print()
    for command, purpose in (
        (f"pip install -e {shown_path(root)}", "makes the step known everywhere"),
        (f"pytest {shown_path(root)}", "runs its test; pip install pytest if it is not there"),
        (f"steps show {step_id}", ""),
        (f"steps run {step_id} --input rows=FILE.jsonl", ""),
    ):
        comment = terminal.style(f"   # {purpose}", "dim") if purpose else ""
        terminal.print(f"  {terminal.style(command, 'cyan')}{comment}")
    return 0


def write_step(root: Path, step_id: str) -> list[Path]:
    """Write a step into the pack at `root`, making the pack if it is not there. Returns the new files.

    Raises:
        RequestError: the pack has that step already, or the folder is something else.
    """
    package = _identifier(root.resolve().name)
    module = _identifier(step_id.rsplit("/", 1)[-1])
    fields = {
        "step_id": step_id,
        "package": package,
        "module": module,
        "class_name": "".join(part.capitalize() for part in module.split("_")) + "Config",
        "category": step_id.split("/", 1)[0] if "/" in step_id else "data_prep",
        "distribution": package.replace("_", "-"),
    }
    pyproject = root / "pyproject.toml"
    if root.exists() and any(root.iterdir()) and not pyproject.is_file():
        raise RequestError(
            f"'{root}' is not empty and is no pack",
            expected="a new folder, or one that `steps new` made",
            hints=(f"steps new {step_id} --into OTHER",),
        )
    inside = root / package
    files = {
        pyproject: _PYPROJECT,
        inside / "__init__.py": '"""Steps of this pack."""\n',
        inside / "pack" / "manifests" / f"{step_id}.toml": _MANIFEST,
        inside / "pack" / "configs" / step_id / "default.yaml": _CONFIG,
        inside / f"{module}.py": _MODULE,
        root / "tests" / f"test_{module}.py": _TEST,
    }
    shared = (pyproject, inside / "__init__.py")
    taken = [path for path in files if path.exists() and path not in shared]
    if taken:
        raise RequestError(f"this would overwrite '{taken[0]}'", hints=("choose another step id or folder",))
    written = []
    for path, template in files.items():
        if path.exists():
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        text = template
        for name, value in fields.items():
            text = text.replace(f"@{name}@", value)
        path.write_text(text, encoding="utf-8")
        written.append(path)
    return written


def _identifier(text: str) -> str:
    name = re.sub(r"\W+", "_", text).strip("_").lower() or "step"
    return name if not name[0].isdigit() else f"_{name}"


_PYPROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "@distribution@"
version = "0.1.0"
description = "Steps for nemotron_steps"
requires-python = ">=3.11"
dependencies = ["nemotron-steps"]

[project.entry-points."nemotron_steps.packs"]
@package@ = "@package@:pack"

[tool.hatch.build.targets.wheel]
packages = ["@package@"]

[tool.pytest.ini_options]
pythonpath = ["."]
testpaths = ["tests"]
"""

_MANIFEST = """\
[step]
id = "@step_id@"
name = "@module@"
category = "@category@"
description = "Copies a JSON Lines data set without its longest rows."
tags = ["example"]
version = "1"
entry = "@package@.@module@:run"
config_schema = "@package@.@module@:@class_name@"

[[consumes]]
name = "rows"
type = "training_jsonl"
description = "the data set to filter"

[[produces]]
name = "filtered"
type = "training_jsonl"
description = "the rows that are short enough"

[[parameters]]
name = "max_characters"
description = "longest row that is kept, in characters of JSON"
default = 20000

[[strategies]]
when = "Too few rows are left"
then = "Raise the limit."
override = "max_characters*=2|40000"
"""

_CONFIG = """\
max_characters: 20000
"""

_MODULE = '''\
"""@step_id@: copy a JSON Lines data set without its longest rows."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, PositiveInt

from nemotron_steps.errors import DataError
from nemotron_steps.runs.context import StepContext


class @class_name@(BaseModel):
    """The step's config. Unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_characters: PositiveInt = 20_000
    """Longest row that is kept, in characters of JSON."""


def run(context: StepContext[@class_name@]) -> None:
    """Write the rows of `rows` that are short enough to `filtered`."""
    source = context.inputs["rows"].require_jsonl("train")
    target = context.outputs["filtered"].path / "train.jsonl"
    kept = dropped = 0
    with source.open(encoding="utf-8") as rows, target.open("w", encoding="utf-8") as output:
        for line in rows:
            if len(line.rstrip("\\n")) <= context.config.max_characters:
                output.write(line)
                kept += 1
            else:
                dropped += 1
    if not kept:
        raise DataError("no row is short enough", where=str(source), hints=("max_characters=40000",))
    context.tracker.summary({"kept": kept, "dropped": dropped})
'''

_TEST = """\
from __future__ import annotations

import json
from pathlib import Path

import pytest
from @package@.@module@ import @class_name@, run

from nemotron_steps.errors import DataError
from nemotron_steps.runs.context import plain_context


def _context(folder: Path, limit: int):
    rows = folder / "train.jsonl"
    rows.write_text("".join(json.dumps({"text": "x" * n}) + "\\n" for n in (5, 500)))
    config = @class_name@(max_characters=limit)
    return plain_context(config, folder / "run", inputs={"rows": rows.parent}, outputs={"filtered": "training_jsonl"})


def test_long_rows_are_left_out(tmp_path):
    context = _context(tmp_path, 200)
    run(context)
    lines = (context.outputs["filtered"].path / "train.jsonl").read_text().splitlines()
    assert len(lines) == 1
    assert json.loads(lines[0]) == {"text": "xxxxx"}


def test_nothing_left_is_an_error(tmp_path):
    with pytest.raises(DataError, match="no row is short enough"):
        run(_context(tmp_path, 1))
"""
