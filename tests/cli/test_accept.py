"""`--why` says what changed since a step was made, and `--accept` takes what its changed code would make again."""

from __future__ import annotations

import json
import shutil
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from tests.cli.conftest import TOY_PACK, Cli

CHAIN = ("toy/train", "-c", "tiny")


@pytest.fixture
def pack(cli: Cli, workplace: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The toy steps in a folder of their own, run once."""
    folder = Path(shutil.copytree(TOY_PACK, workplace / "pack"))
    monkeypatch.setenv("STEPS_PATH", str(folder))
    spec = spec_from_file_location("toy_steps", folder / "toy_steps.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "toy_steps", module)
    spec.loader.exec_module(module)
    assert cli("run", *CHAIN).code == 0
    return folder


def edit(pack: Path) -> None:
    with (pack / "toy_steps.py").open("a") as file:
        file.write("\n")


def states(cli: Cli, *words: str) -> list[bool]:
    return [step["cached"] is not None for step in cli("plan", *CHAIN, *words, "--json").json["steps"]]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--home", "another"), False, {"toy/train": "no earlier result"}),
        (("optimizer.lr=0.5",), False, {"toy/train": "config optimizer.lr: 0.1 -> 0.5"}),
        (("seed=3",), False, {"toy/train": "config seed: null -> 3"}),
        ((), True, {"toy/make": "code: toy_steps.py", "toy/train": "code: toy_steps.py"}),
        (("seed=3",), True, {"toy/make": "code: toy_steps.py", "toy/train": "config seed: null -> 3"}),
        (("--force",), False, {"toy/train": "--force"}),
    ],
)
def test_why_says_what_changed(cli: Cli, pack: Path, workplace: Path, words: tuple[str, ...], code: bool, said) -> None:
    if code:
        edit(pack)
    shown = cli("plan", *CHAIN, *words, "--why").out
    for step, line in said.items():
        assert line in shown.rpartition(f" {step} ")[2], shown
    assert ("made by 0.1.0, changed: toy_steps.py" in shown) is code
    assert ("--accept toy/make" in shown) is code


def test_what_only_changed_code_would_make_again_is_accepted_on_request(cli: Cli, pack: Path, workplace: Path) -> None:
    cli("run", *CHAIN, "optimizer.lr=0.5")
    edit(pack)
    assert states(cli) == [False, False]
    told = "made by 0.1.0, changed: toy_steps.py"
    ran = cli("run", *CHAIN, "--accept", "toy/make", "--accept", "toy/train")
    assert ran.code == 0 and "nothing to do" in ran.out and told in ran.out
    assert states(cli) == [True, True] and states(cli, "optimizer.lr=0.5") == [True, False]
    model = cli("artifacts", "show", "toy/train/model", "--json").json
    producer = model["producer"]
    (accepted,) = producer["accepted"]
    assert accepted["by"] and accepted["key"] != producer["cache_key"]
    assert accepted["changed"] == ["toy_steps.py"]
    told_by = [cli("artifacts", "lineage", "toy/train/model", *words).out for words in ((), ("--json",))]
    assert told_by[0].count(told) == 2 and '"accepted": "by ' in told_by[1].partition("ancestors")[0]
    assert cli("artifacts", "list").out.count(", accepted)") == 2
    assert json.loads(Path(model["path"], "model.json").read_text())["lr"] == 0.1  # of the two, the one asked for
    edit(pack)
    planned = cli("plan", *CHAIN, "--why").out
    assert told in planned and f"code: {told.partition('changed: ')[2]}" in planned
    assert cli("plan", *CHAIN, "--accept", "toy/make", "--accept", "toy/train").code == 0
    assert told in cli("artifacts", "show", "toy/train/model").out
    again = cli("artifacts", "show", "toy/train/model", "--json").json["producer"]["accepted"]
    assert [each["key"] for each in again] == [accepted["key"], producer["cache_key"]]
    assert cli("artifacts", "verify").code == 0


@pytest.mark.parametrize(
    ("words", "why", "hint"),
    [
        (("--accept", "toy/train"), "is cached", "steps plan toy/train"),
        (("--accept", "toy/trian"), "no step of the plan", "--accept toy/train"),
        (("seed=3", "--accept", "toy/train"), "config seed: null -> 3", "steps plan toy/train --why"),
        (("--accept", "toy/make", "--home", "another"), "no earlier result", "steps plan toy/make --why"),
        (("--accept", "toy/train", "edited"), "it reads what toy/make makes", "--accept toy/make --accept toy/train"),
    ],
)
def test_nothing_to_accept_is_an_error(cli: Cli, pack: Path, words: tuple[str, ...], why: str, hint: str) -> None:
    if "edited" in words:
        edit(pack)
    refused = cli("plan", *CHAIN, *(word for word in words if word != "edited"))
    assert refused.code == 2 and why in refused.err and f"hint: {hint}" in refused.err
    assert "accepted" not in cli("artifacts", "show", "toy/train/model", "--json").out


@pytest.mark.parametrize("flag", ["--force", "--dry-run"])
def test_accept_stands_with_nothing_that_forgets_it(cli: Cli, pack: Path, flag: str) -> None:
    for command in ("run", "plan") if flag == "--force" else ("run",):
        assert "--force makes it anew" in cli(command, *CHAIN, "--accept", "toy/train", flag).err
