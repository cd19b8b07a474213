"""A package that keeps to every rule, written to a folder as if it were installed, and changes that break one rule."""

from collections.abc import Mapping
from pathlib import Path

STEP = {
    "toykit/__init__.py": '"""A toy."""\n',
    "toykit/pack/manifests/toykit/shorten.toml": """\
[step]
id = "toykit/shorten"
name = "Shorten"
category = "data_prep"
description = "Keeps the first rows."
version = "1"
entry = "toykit.shorten:run"
config_schema = "toykit.shorten:ShortenConfig"

[[consumes]]
name = "rows"
type = "training_jsonl"
description = "rows to shorten"

[[produces]]
name = "short"
type = "training_jsonl"
description = "the first of them"

[[parameters]]
name = "count"
description = "rows to keep"
default = 3

[[parameters]]
name = "order"
description = "which rows come first"
default = "first"
choices = ["first", "last"]

[[strategies]]
when = "Too few rows"
then = "Keep more."
override = "count*=2|6"

[[errors]]
name = "no_text"
match = "has no text"
recovery = "Give every row a text."
""",
    "toykit/pack/configs/toykit/shorten/default.yaml": "count: 3\n",
    "toykit/pack/configs/toykit/shorten/tiny.yaml": "count: 2\n",
    "toykit/shorten.py": '''\
"""Keeps the first rows."""

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt

from nemotron_steps.config.schema.base import OPERATIONAL
from nemotron_steps.errors import ArtifactError, DataError
from toykit import words


class ShortenConfig(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    count: PositiveInt = 3
    order: Literal["first", "last"] = "first"


def run(context):
    source = context.inputs["rows"].require_jsonl("train")
    rows = []
    for number, line in enumerate(source.read_text("utf-8").splitlines(), start=1):
        row = json.loads(line)
        if not isinstance(row.get("text"), str):
            raise DataError("the row has no text", where=f"{source}:{number}", found=line[:80])
        rows.append(row)
    kept = rows[: context.config.count] if context.config.order == "first" else rows[-context.config.count :]
    with (context.outputs["short"].path / "train.jsonl").open("w") as file:
        for row in kept:
            file.write(json.dumps({"text": words.clean(row["text"])}) + "\\n")
    context.tracker.summary({"rows": len(kept)})
''',
    "toykit/words.py": "def clean(text):\n    return text.strip()\n",
}
"""Path → text of a package with one step."""

TABLE_STEP = {
    "toykit_table/__init__.py": "",
    "toykit_table/pack/manifests/types.toml": '[toy_table]\ndescription = "Columns of numbers, table.json."\n',
    "toykit_table/pack/manifests/sum.toml": """\
[step]
id = "toykit_table/sum"
name = "Sum"
category = "eval"
description = "Adds up each column."
entry = "toykit_table.add:run"
config_schema = "toykit_table.add:AddConfig"

[[consumes]]
name = "table"
type = "toy_table"
description = "numbers"

[[produces]]
name = "report"
type = "eval_report"
description = "the sum of each column"
""",
    "toykit_table/add.py": """\
import json

from pydantic import BaseModel, ConfigDict

from nemotron_steps.errors import ArtifactError, DataError


class AddConfig(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


def run(context):
    file = context.inputs["table"].path / "table.json"
    if not file.is_file():
        raise ArtifactError("the table has no table.json", where=str(file))
    try:
        table = json.loads(file.read_text("utf-8"))
    except UnicodeDecodeError as error:
        raise DataError("the table is no text", where=str(file)) from error
    except json.JSONDecodeError as error:
        raise DataError("the table is no JSON", where=str(file)) from error
    sums = {name: sum(column) for name, column in table.items()}
    (context.outputs["report"].path / "report.json").write_text(json.dumps({"metrics": sums}))
    context.tracker.summary(sums)
""",
}
"""With a step that takes a type of the package's own."""

ENVIRONMENT = {
    "toykit_env/__init__.py": "",
    "toykit_env/environment.py": '''\
"""Sums. A row has `expected_answer`, the sum as text."""

import asyncio
import json
import random
import time
from typing import ClassVar

from pydantic import ConfigDict, create_model, model_validator

from nemotron_steps.environments.base import Environment, EnvironmentConfig, RowError, Session, GradeResult

TOOL = {
    "type": "function",
    "name": "add",
    "description": "Adds two numbers.",
    "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
}


class SumConfig(EnvironmentConfig):
    full: float = 1.0
    """Reward of a right answer."""


class Sum(Environment):
    name: ClassVar[str] = "toykit_env"
    required_fields = ("expected_answer",)
    config_class = SumConfig
    count = 0

    def check_values(self, row):
        if not isinstance(row["expected_answer"], str) or not row["expected_answer"]:
            raise RowError("expected_answer", "a text", repr(row["expected_answer"])[:50])

    async def seed(self, row):
        return Session(tools=[dict(TOOL)], state={"calls": 0})

    async def call_tool(self, session, name, arguments):
        session.state["calls"] += 1
        a, b = arguments.get("a"), arguments.get("b")
        if name != "add" or not isinstance(a, int | float) or not isinstance(b, int | float):
            return "error: add(a: number, b: number)"
        return f"{a + b} ({session.state['calls']} calls)"

    async def verify(self, row, response, session):
        text = response.text.strip()
        await asyncio.sleep(0)
        right = text == row["expected_answer"].strip()
        reward = self.config.full if right else 0.0
        return GradeResult(reward, {"length": min(len(text), 100)}, None, {"found": text[:50]})
''',
}
"""With an environment that has a tool."""
ENVIRONMENT_POINTS = {"nemotron_steps.environments": "toykit_env = toykit_env.environment:Sum"}

Change = tuple[str, str, str]
"""(end of a path, text in it, other text); an empty text stands for a whole new file."""


def write_package(
    root: Path, files: Mapping[str, str], changes: tuple[Change, ...] = (), points: Mapping[str, str] | None = None
) -> Path:
    """Write a package into `root` with its metadata beside it, so that a path with `root` in it has it installed."""
    changed = dict(files)
    for end, old, new in changes:
        path = next((path for path in changed if path.endswith(end)), end)
        if old:
            assert old in changed[path], f"{old!r} is not in {path}"
        changed[path] = changed[path].replace(old, new) if old else new
    package = next(iter(files)).partition("/")[0]
    groups = points or {"nemotron_steps.packs": f"{package} = {package}:pack"}
    info = f"{package}-1.0.dist-info"
    changed[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n"
    changed[f"{info}/entry_points.txt"] = "".join(f"[{group}]\n{line}\n" for group, line in groups.items())
    for path, text in changed.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text, encoding="utf-8")
    return root
