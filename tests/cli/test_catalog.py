from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from nemotron_steps.cli.catalog import _default, _mention_problems, _port, _tree, purpose
from nemotron_steps.cli.terminal import Terminal
from nemotron_steps.errors import ManifestError

from .conftest import Cli


def _ids(cli: Cli, *arguments: str) -> set[str]:
    return {row["id"] for row in cli("list", "--json", *arguments).json["steps"]}


def test_list_shows_every_step_by_category(cli):
    result = cli("list")
    assert result.code == 0
    lines = result.out.splitlines()
    assert "rl" in lines
    assert any(line.split()[0] == "rl/nemo_rl/rlhf" and "→ checkpoint_megatron" in line for line in lines if line)
    assert any("toy/train" in line and "Trains a toy on rows" in line for line in lines)
    assert "toy_all  " in result.out


def test_list_filters_know_subtypes(cli):
    assert _ids(cli, "--tag", "toy", "--tag", "data") == {"toy/make"}
    assert "toy/make" in _ids(cli, "--produces", "toy_data")
    assert "toy/train" in _ids(cli, "--consumes", "toy_rows")
    assert _ids(cli, "--category", "train") == {"toy/train"}
    # is_a goes one way: a toy_data is not a toy_rows.
    assert _ids(cli, "--consumes", "toy_rows") == {"toy/train"}
    assert "toy/train" not in _ids(cli, "--produces", "toy_rows")


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (("--produces", "toy_modle"), "steps list --produces toy_model"),
        (("--consumes", "toy_row"), "steps list --consumes toy_rows"),
        (("--category", "trian"), "steps list --category train"),
    ],
)
def test_an_unknown_filter_names_the_nearest(cli, arguments, hint):
    result = cli("list", *arguments)
    assert result.code == 2
    assert hint in result.err
    assert result.out == ""


def test_no_match_is_no_error(cli):
    result = cli("list", "--tag", "nothing-has-this")
    assert (result.code, result.out) == (0, "no step matches\n")


def test_tree(cli):
    lines = cli("list", "--tree", "--tag", "toy").out.splitlines()
    assert lines[0] == "└── toy"
    assert lines[1].startswith("    ├── make")
    assert lines[2].startswith("    └── train")


def test_show(cli):
    result = cli("show", "toy/train")
    assert result.code == 0
    for text in ("toy/train", "rows", "toy_data", "[data.path]", "toy_model", "optimizer.name", "adam (adam | sgd)"):
        assert text in result.out
    assert "tiny" in result.out
    assert "optimizer.lr/=3|0.01" in result.out
    assert "steps run toy/train -c tiny --dry-run" in result.out


def test_show_says_what_each_config_is_for(cli):
    """So that nobody takes a cluster's for a workstation's."""
    shown = {line.split()[0]: line for line in cli("show", "rl/nemo_rl/rlvr").out.splitlines() if line.startswith("  ")}
    assert "one GPU" in shown["one_gpu"] and "one node of eight GPUs" in shown["one_node"]
    assert "109 nodes" in shown["rlvr1"] and "21 nodes" in shown["small"] and "32 nodes" in shown["nano3"]


def test_show_json_has_manifest_and_configs(cli):
    shown = cli("show", "toy/train", "--json").json
    assert shown["manifest"]["step"]["entry"] == "toy_steps:train"
    assert set(shown["configs"]) == {"default", "tiny"}


def test_show_an_unknown_step(cli):
    result = cli("show", "toy/trian")
    assert result.code == 2
    assert "steps show toy/train" in result.err


def test_show_a_pipeline_says_how_to_see_it(cli):
    result = cli("show", "toy_all")
    assert result.code == 2
    assert "is a pipeline" in result.err
    assert "steps plan toy_all" in result.err


def test_types(cli):
    result = cli("types")
    assert "└── toy_rows" in result.out
    assert "converts to toy_export by toy/convert" in result.out
    types = cli("types", "--json").json
    assert types["toy_rows"]["is_a"] == ["toy_data"]
    assert types["toy_model"]["convert_to"] == {"toy_export": "toy/convert"}
    assert types["toy_data"]["produced_by"] == ["toy/make"]
    assert (types["toy_model"]["produced_by"], types["toy_model"]["consumed_by"]) == (["toy/train"], ["toy/convert"])
    assert types["toy_model"]["description"] == "A trained toy"


def test_a_broken_manifest_is_mentioned_and_the_rest_works(cli, workplace):
    broken = workplace / "manifests"
    broken.mkdir()
    (broken / "bad.toml").write_text('[step]\nid = "toy/bad"\nentry = "no colon"\n[[produces]]\ntype = "toy_rows"\n')
    result = cli("list", "--tag", "toy")
    assert result.code == 0
    assert "toy/make" in result.out
    assert "1 manifest problem, not listed" in result.err
    shown = cli("show", "toy/bad")
    assert shown.code == 2
    assert "bad.toml:3" in shown.err


def test_help_and_version(cli):
    assert "usage: steps" in cli("--help").out
    assert cli("--version").out.strip()
    assert "usage: steps run" in cli("run", "--help").out
    assert "usage: steps" in cli().out


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (("lst",), "did you mean 'list'"),
        (("list", "--categorie", "x"), "--category"),
        (("artifacts", "lst"), "did you mean 'list'"),
        (("show",), "steps show --help"),
        (("run", "--dryrun", "toy/make"), "--dry-run"),
    ],
)
def test_a_wrong_command_line_names_the_nearest(cli, arguments, hint):
    result = cli(*arguments)
    assert result.code == 2
    assert hint in result.err


@pytest.mark.parametrize(("count", "said"), [(0, ""), (1, "1 manifest problem,"), (2, "2 manifest problems,")])
def test_manifest_problems_are_counted(count: int, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    problems = tuple(ManifestError(f"p{number}") for number in range(count))
    _mention_problems(SimpleNamespace(problems=problems), Terminal.of())
    assert capsys.readouterr().err == (f"{said} not listed here: steps doctor\n" if said else "")


@pytest.mark.parametrize(
    "flags", [("--category", "train"), ("--consumes", "toy_rows"), ("--produces", "toy_rows"), ("--tag", "toy")]
)
def test_pipelines_are_listed_where_no_kind_of_step_is_asked_for(cli: Cli, flags: tuple[str, str]) -> None:
    assert "toy_all" in {row["name"] for row in cli("list", "--json").json["pipelines"]}
    assert cli("list", *flags, "--json").json["pipelines"] == []
    assert "toy_all" not in cli("list", *flags).out


def test_the_purpose_of_a_config_is_the_comment_that_it_begins_with(tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    file.write_text("# @package _global_\n# For one\n# GPU. And more.\nkey: 1\n# Not this.\n")
    assert purpose(file) == "For one GPU"
    file.write_text("key: 1\n# Not this.\n")
    assert purpose(file) == ""


@pytest.mark.parametrize(
    ("entry", "shown"),
    [
        ({"default": 0}, "0"),
        ({"default": False}, "false"),
        ({"default": True, "choices": [True, False]}, "true (true | false)"),
        ({"choices": ["a", 1]}, " (a | 1)"),
        ({}, ""),
    ],
)
def test_a_parameters_default_is_shown_whatever_it_is(entry: dict, shown: str) -> None:
    assert _default(entry) == shown


def test_a_port_is_shown_with_where_it_is_bound_and_whether_it_may_be_left_out() -> None:
    terminal = Terminal.of()
    optional = {"name": "rows", "type": "toy_rows", "required": False, "bind": ["a", "b"], "description": "to check"}
    assert _port(optional, str, terminal) == ["rows", "toy_rows", "optional: to check  [a, b]"]
    assert _port({"type": "toy_rows", "bind": "a"}, str, terminal) == ["toy_rows", "toy_rows", "  [a]"]


def test_a_step_of_another_packs_name_stands_below_that_in_the_tree() -> None:
    rows = [SimpleNamespace(id=step, description="Does it. Well.", name="") for step in ("public:rl/x", "rl/x", "y")]
    below = {"x  Does it": {}}
    assert _tree(rows, Terminal.of()) == {"public:": {"rl": below}, "rl": below, "y  Does it": {}}


def test_what_is_tried_first_is_tiny_where_there_is_one(cli: Cli) -> None:
    assert "steps run toy/train -c tiny --dry-run" in cli("show", "toy/train").out
    assert "steps run toy/make -c default --dry-run" in cli("show", "toy/make").out


def test_a_type_that_is_like_no_other_is_refused_with_where_to_look(cli: Cli) -> None:
    assert "hint: steps types" in cli("list", "--produces", "zzzzzz").err
    assert "hint:" not in cli("list", "--category", "zzzzzz").err
