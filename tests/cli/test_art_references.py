"""`${art:NAME}` in a config feeds the input that is bound to the key, with its edge in the lineage."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nemotron_steps.artifacts.store import ArtifactStore
from tests.cli.conftest import Cli

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


def test_an_override_and_an_inputs_section_take_references(cli: Cli, workplace: Path) -> None:
    name = made(cli)
    assert cli("plan", "toy/train", "-c", "tiny", f"data.path=${{art:{name}}}").code == 0
    Path("mine.yaml").write_text(f"defaults: [tiny]\ninputs:\n  rows: ${{art:{name}}}\n")
    planned = cli("plan", "toy/train", "-c", "mine.yaml", "--json").json
    assert [step["step"] for step in planned["steps"]] == ["toy/train"]


def test_the_run_table_names_artifacts_as_in_published_configs(cli: Cli) -> None:
    name = made(cli)
    Path("mine.yaml").write_text(f"defaults: [tiny]\nrun:\n  data: {name}:latest\ndata:\n  path: ${{art:data}}\n")
    assert cli("run", "toy/train", "-c", "mine.yaml").code == 0


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


def test_prompts_to_validate_on_are_an_artifacts_validation_split_where_it_has_one(cli: Cli, workplace: Path) -> None:
    add_splits(cli, workplace, "rows")
    planned = [
        cli("plan", "rl/nemo_rl/rlvr", "-c", "tiny", f"data.validation.data_path=${{art:rows{split}}}")
        for split in ("", ",val", ",train")
    ]
    assert [result.code for result in planned] == [0, 0, 2]
    assert "data.validation.data_path='${art:rows:latest}'" in planned[2].err
