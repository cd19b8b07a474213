"""`steps artifacts`, and references to artifacts in configs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nemotron_steps.artifacts.store import ArtifactStore
from tests.artifacts.checkpoint_files import write_hf, write_safetensors
from tests.cli.conftest import Cli


def test_what_is_added_is_said_shown_and_listed_with_where_it_came_from(cli: Cli, workplace: Path) -> None:
    data = workplace / "data"
    data.mkdir()
    for number in range(23):
        (data / f"{number:02d}.jsonl").write_text('{"x": 1}\n')
    added = cli("artifacts", "add", str(data), "--name", "mine")
    assert added.code == 0 and "--input PORT=mine:v1" in added.out
    again = cli("artifacts", "add", str(data), "--name", "mine", "--json").json
    assert (again["ref"], len(again["files"])) == ("mine:v1", 23)
    shown = cli("artifacts", "show", "mine").out
    assert f"added from {data}" in shown and again["digest"] in shown
    assert "19.jsonl" in shown and "20.jsonl" not in shown and "… 3 more" in shown
    assert cli("artifacts", "show", "mine", "--json").json == again
    (listed,) = cli("artifacts", "list", "--json").json
    assert listed == again
    assert "added from" in cli("artifacts", "list").out


def test_what_is_added_as_a_packs_own_type_is_looked_at_as_what_that_is(cli: Cli, workplace: Path) -> None:
    (workplace / "manifests").mkdir()
    (workplace / "manifests" / "types.toml").write_text('[my_rows]\ndescription = "x"\nis_a = ["training_jsonl"]\n')
    (workplace / "rows.jsonl").write_text("no JSON\n")
    assert cli("artifacts", "add", "rows.jsonl", "--type", "my_rows").code == 2
    (workplace / "rows.jsonl").write_text('{"a": 1}\n')
    assert cli("artifacts", "add", "rows.jsonl", "--type", "my_rows").code == 0


def test_two_productions_show_the_config_the_rows_and_the_lineage_that_differ(cli, workplace):
    assert cli("run", "toy_all").code == 0
    assert cli("run", "toy_all", "make.count=2", "train.optimizer.lr=0.5").code == 0
    rows = cli("artifacts", "diff", "toy/make/rows:v1", "toy/make/rows:v2")
    assert rows.code == 1
    assert "rows of train.jsonl: 0 added, 2 removed, 2 the same" in rows.out
    assert "count" in rows.out and "4 → 2" in rows.out
    found = cli("artifacts", "diff", "toy/train/model:v1", "toy/train/model:v2", "--json").json
    assert found["config"] == {"optimizer.lr": [0.1, 0.5]}
    assert found["inputs"] == {"rows": ["toy/make/rows:v1", "toy/make/rows:v2"]}
    assert found["ancestors"] == {"only_a": ["toy/make/rows:v1"], "only_b": ["toy/make/rows:v2"]}
    assert list(found["files"]) == ["model.json"] and found["same"] is False


def test_checkpoints_show_the_tensor_that_differs_most(cli, workplace):
    for name, values in (("one", [1.0, 2.0]), ("two", [1.0, 2.5])):
        folder = write_hf(workplace / name)
        write_safetensors(folder / "model.safetensors", {"a": values, "b": [3.0]})
        assert cli("artifacts", "add", str(folder), "--name", name).code == 0
    found = cli("artifacts", "diff", "one", "two")
    assert found.code == 1 and "tensors: 1 differ, 1 the same, largest difference 0.5 in a" in found.out


ROW = {
    "responses_create_params": {"input": [{"role": "user", "content": "spell tac backwards"}]},
    "agent_ref": {"type": "responses_api_agents", "name": "reasoning_gym_simple_agent"},
    "question": "spell tac backwards",
    "answer": "cat",
    "metadata": {"source_dataset": "spell_backward"},
}


def made(cli: Cli) -> str:
    """Rows of the toy, committed; their name."""
    assert cli("run", "toy/make").code == 0
    return "toy/make/rows"


def add_splits(cli: Cli, workplace: Path, name: str) -> None:
    """Prompts with rows to train and to validate on, as an artifact of that name."""
    folder = workplace / "rows"
    folder.mkdir()
    for split in ("train", "validation"):
        (folder / f"{split}.jsonl").write_text(json.dumps(ROW) + "\n")
    assert cli("artifacts", "add", str(folder), "--type", "rl_prompts", "--name", name).code == 0


@pytest.mark.parametrize("version", ["", ":v1", ":latest", ",path"])
def test_a_reference_at_a_bound_key_feeds_the_input(cli: Cli, workplace: Path, version: str) -> None:
    name = made(cli)
    Path("mine.yaml").write_text(f"defaults: [tiny]\ndata:\n  path: ${{art:{name}{version}}}\n")
    assert cli("run", "toy/train", "-c", "mine.yaml").code == 0
    store = ArtifactStore(workplace / "home")
    (edge,) = store.find("toy/train/model").inputs
    assert (edge.port, edge.digest) == ("rows", store.find(name).digest)


def test_splits_of_a_reference_are_those_its_keys_take(cli: Cli, workplace: Path) -> None:
    add_splits(cli, workplace, "super3/data")
    text = "defaults: [tiny]\nrun: {{data: super3/data}}\ndata:\n  train: {{data_path: '${{art:data,{}}}'}}\n"
    Path("mine.yaml").write_text(text.format("train") + "  validation: {data_path: '${art:data,val}'}\n")
    result = cli("plan", "rl/nemo_rl/rlvr", "-c", "mine.yaml", "--json")
    assert result.code == 0, result.err
    inputs = result.json["steps"][-1]["inputs"]
    assert inputs["prompts"]["ref"] == "super3/data:latest"
    assert "validation" not in inputs  # its split is that of the prompts
    Path("mine.yaml").write_text(text.format("val"))
    result = cli("plan", "rl/nemo_rl/rlvr", "-c", "mine.yaml")
    assert result.code == 2
    assert "takes another part of the artifact" in result.err
    assert "data.train.data_path='${art:super3/data:latest}'" in result.err
    Path("mine.yaml").write_text(text.format("train") + "  validation: {data_path: '${art:other,val}'}\n")
    result = cli("plan", "rl/nemo_rl/rlvr", "-c", "mine.yaml")
    assert result.code == 2
    assert "the config names several artifacts for the input 'prompts'" in result.err
