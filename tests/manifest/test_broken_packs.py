"""Packs with one thing wrong: it is told when the pack is looked at or planned with, at its place, by every command
that may meet it, and what else is there goes on working. A hint for the shell is pasted, and mends it."""

import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from nemotron_steps.cli.doctor import FAILED, _packs, _plugins
from nemotron_steps.session.session import Session
from tests.cli.conftest import Cli, cli, workplace
from tests.manifest.packs_on_disk import write_files

__all__ = ["cli", "workplace"]

FILES = {
    "manifests/one.toml": """[step]
id = "own/one"
entry = "own_code.steps:run"
config_schema = "own_code.config:Config"
preflight = "own_code.steps:check"

[[consumes]]
type = "own_rows"
name = "rows"
required = false

[[produces]]
type = "own_model"
name = "model"

[[parameters]]
name = "steps"
""",
    "manifests/other.toml": """[step]
id = "own/other"
entry = "own_code.other:run"

[[produces]]
type = "own_rows"
name = "rows"
""",
    "manifests/types.toml": """[own_rows]
description = "Rows"

[own_model]
description = "A model"
is_a = ["own_thing"]

[own_thing]
description = "Anything"
""",
    "manifests/chain.toml": """[pipeline]
name = "own_chain"

[[stages]]
step = "own/other"

[[stages]]
step = "own/one"
config = "small"
inputs = { rows = "other.rows" }
""",
    "configs/own/one/default.yaml": "steps: 1\n",
    "configs/own/one/small.yaml": "steps: 1\n",
    "own_code/__init__.py": "",
    "own_code/other.py": "def run(context):\n    (context.outputs['rows'].path / 'rows').write_text('1')\n",
    "own_code/config.py": """from pydantic import BaseModel, ConfigDict


class Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    steps: int = 1


def make():
    pass
""",
    "own_code/steps.py": """
try:
    import torch
except ImportError:
    torch = None

OPTIONS = {"steps": 1}


def run(context):
    context.outputs["model"].path.joinpath("weights").write_text("1")


def check(config, inputs):
    pass
""",
}
PLAN = "plan own/one"


@dataclass(frozen=True)
class Broken:
    """One pack.

    Attributes:
        name: what is wrong.
        file: where it is changed: `old` becomes `new`, or the file is called that, or is not there (None).
        place: the end of what the error names, file and line.
        says: part of the message.
        command: which meets it; an error of it where `code` is one, else it works and `doctor` alone tells.
    """

    name: str
    file: str
    old: str
    new: str | None
    place: str
    says: str
    command: str = PLAN
    code: str | None = "E100"
    more: Mapping[str, str] = field(default_factory=dict)


ONE, TYPES, CHAIN, CODE = "manifests/one.toml", "manifests/types.toml", "manifests/chain.toml", "own_code/steps.py"
RENAMED = "renamed"
BROKEN = (
    # tables and keys
    Broken("[[produce]]", ONE, "[[produces]]", "[[produce]]", "one.toml:12", "unknown table 'produce'"),
    Broken("[produces] for a list", ONE, "[[produces]]", "[produces]", "one.toml:12", "'produces' has the wrong type"),
    Broken("[[step]]", ONE, "[step]", "[[step]]", "one.toml:1", "'step'"),
    Broken("no [step]", ONE, "[step]", "[stepp]", "one.toml:1", "the file is not a manifest", code="E110"),
    Broken("a misspelt key", ONE, "entry =", "entyr =", "one.toml:3", "unknown key 'step.entyr'"),
    Broken("a port without a type", ONE, 'type = "own_rows"\n', "", "one.toml:7", "'consumes[0].type' is missing"),
    Broken("an id with capitals", ONE, "own/one", "own/One", "one.toml:2", "step id 'own/One'", "plan own/One"),
    Broken(
        "two ports of a name", ONE, "[[parameters]]", '[[produces]]\ntype = "own_rows"\nname = "model"\n[[parameters]]',
        "one.toml:12", "two entries are named 'model'",
    ),
    Broken("broken TOML", ONE, 'name = "rows"', 'name = "rows', "one.toml:9", "not valid TOML"),
    Broken("a parameter", ONE, '"steps"\n', '"stesp"\n', "one.toml:17", "not a key of its config", code="E308"),
    # types
    Broken("a type that nobody declares", ONE, '"own_rows"', '"parquet"', "one.toml:8", "'parquet' is not"),
    Broken("a parent", TYPES, '"own_thing"', '"own_thign"', "types.toml:6", "which is not a type", code=None),
    # code
    Broken("a module", ONE, "own_code.steps:run", "own_code.step:run", "one.toml:3", "'own_code.step'"),
    Broken("a function that there is not", ONE, "steps:run", "steps:rnu", "one.toml:3", "has no 'rnu'"),
    Broken("a function of nothing", CODE, "run(context)", "run()", "one.toml:3", "'run()' is called with 1"),
    Broken("a coroutine", CODE, "def run", "async def run", "one.toml:3", "is a coroutine function"),
    Broken("a preflight of one argument", CODE, "check(config, inputs)", "check(config)", "one.toml:5", "with 2"),
    Broken("code that is no Python", CODE, "try:", "try", "one.toml:3", "invalid Python"),
    Broken(
        "code that fails at import", CODE, "try:", "raise OSError(7)\ntry:", "own_code/steps.py:2", "OSError: 7",
        "run own/one", "E500",
    ),
    Broken(
        "an output that the manifest has not", CODE, '["model"]', '["modle"]', "", "asks for its output 'modle'",
        "run own/one", "E601",
    ),
    # files
    Broken("type.toml", TYPES, RENAMED, "manifests/type.toml", "type.toml:1", "the file is not a manifest"),
    # pipelines
    Broken("a stage of no step", CHAIN, '"own/one"', '"own/oen"', "chain.toml:7", "there is no step 'own/oen'",
           "plan own_chain", "E110"),
    Broken("a stage's input", CHAIN, "{ rows", "{ rosw", "chain.toml:10", "'rosw'", "plan own_chain", "E305"),
    Broken("[[stage]]", CHAIN, "[[stages]]", "[[stage]]", "chain.toml:4", "unknown key 'stage'", "plan own_chain"),
    Broken("a stage from a later one", CHAIN, '"own/other"', '"own/other"\ninputs = { x = "one" }', "chain.toml:4",
           "not before it", "plan own_chain"),
)  # fmt: skip


@pytest.fixture
def pack(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = write_files(workplace / "pack", FILES)
    monkeypatch.setenv("STEPS_PATH", f"{root}")
    monkeypatch.syspath_prepend(str(root))
    yield root
    for name in [name for name in sys.modules if name.partition(".")[0] == "own_code"]:
        del sys.modules[name]


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.name)
def test_what_is_wrong_with_a_pack_is_told_at_its_place(broken: Broken, pack: Path, cli: Cli) -> None:
    file = pack / broken.file
    if broken.old == RENAMED:
        (pack / broken.new).parent.mkdir(parents=True, exist_ok=True)
        file.rename(pack / broken.new)
    else:
        assert broken.old in file.read_text()
        file.write_text(file.read_text().replace(broken.old, broken.new))
    result = cli(*broken.command.split())
    found = [each for each in _packs(Session()) if each.state == FAILED]
    told = [f"{each.detail}\n{each.fix}" for each in found]
    if broken.code is None:
        assert result.code == 0, result.err
    else:
        assert result.code and f"error[{broken.code}]" in result.err, result.err
    assert "internal error" not in result.err
    everything = "\n".join([result.err, *told])
    assert broken.says in everything and broken.place in everything, everything
    named = broken.file == CHAIN and broken.code != "E100"  # what a pipeline names, and its plan looks up
    if broken.command.startswith("plan") and broken.code != "E308" and not named:
        assert any(broken.place in each for each in told), told
        of_code = broken.file == CODE or ":" in broken.old  # which is looked at when its step is planned
        assert of_code or "manifest problem" in cli("list").err
    assert cli("plan", "own/other").code == (1 if broken.name == "type.toml" else 0) or broken.file in (TYPES,)
    hints = re.findall("(?:hint: |^)(sed .*)", everything, re.MULTILINE)
    if hints:
        subprocess.run(["bash", "-c", hints[0]], check=True)
        if "[[" not in broken.name:  # of several tables the first
            mended = cli(*broken.command.split())
            assert mended.code == 0, mended.err


def test_the_pack_itself_is_right(pack: Path, cli: Cli) -> None:
    assert not [each for each in _packs(Session()) if each.state == FAILED]
    for command in (PLAN, "plan own_chain", "plan own/one -c small", "show own/one", "run own_chain"):
        result = cli(*command.split())
        assert result.code == 0 and "problem" not in result.err, (command, result.err)


def test_entry_points_that_cannot_be_loaded_are_found_by_the_doctor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {
        "plug-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: plug\nVersion: 1.0\n",
        "plug-1.0.dist-info/entry_points.txt": "[nemotron_steps.environments]\ngone = no_such_plug:Rewards\n"
        "[nemotron_steps.executors]\nbad = plug_code:Absent\ngood = plug_code:Executor\n",
        "plug_code.py": "class Executor:\n    pass\n",
    }
    monkeypatch.syspath_prepend(str(write_files(tmp_path, files)))
    failed = [each.detail for each in _plugins() if each.state == FAILED]
    found = sorted(detail.partition(":")[2].partition(" (")[0].strip() for detail in failed)
    assert found == ["plug_code has no 'Absent'", "there is no module 'no_such_plug'"]
