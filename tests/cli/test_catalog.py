from __future__ import annotations

import pytest

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


def test_show_json_has_manifest_and_configs(cli):
    shown = cli("show", "toy/train", "--json").json
    assert shown["manifest"]["step"]["entry"] == "toy_steps:train"
    assert set(shown["configs"]) == {"default", "tiny"}


def test_show_an_unknown_step(cli):
    result = cli("show", "toy/trian")
    assert result.code == 2
    assert "steps show toy/train" in result.err


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
