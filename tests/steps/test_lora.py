"""Adapters through the steps: what training leaves, what is refused before it starts, what merging makes of it."""

import json
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from nemotron_steps.artifacts.validators import validate_adapter
from nemotron_steps.config.schema.convert import MergeConfig
from nemotron_steps.config.schema.dpo import DpoConfig
from nemotron_steps.config.schema.sft import SftConfig
from nemotron_steps.models.huggingface import load_hf_weights
from nemotron_steps.models.megatron_checkpoint import convert_hf_to_megatron
from nemotron_steps.runs.context import plain_context
from nemotron_steps.steps import convert, supervised
from nemotron_steps.steps.trained_model import save_trained
from tests.models.checkpoints import write_checkpoint
from tests.steps.test_tiny_chain import steps


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    write_checkpoint("qwen3", folder / "hf", initializer_range=0.02)
    convert_hf_to_megatron(folder / "hf", folder / "megatron")
    return folder / "megatron"


def policy(base, lr=1e-2, **peft):
    return {
        "checkpoint": str(base),
        "precision": "float32",
        "train_global_batch_size": 8,
        "train_micro_batch_size": 8,
        "max_total_sequence_length": 128,
        "megatron_cfg": {"optimizer": {"lr": lr}, "peft": {"enabled": True, "dim": 8, "alpha": 16, **peft}},
    }


PLACE = {"backend": "process", "gpus_per_node": 0}


def chats(folder, count=32):
    rows = [
        {"messages": [{"role": "user", "content": f"{n}+1"}, {"role": "assistant", "content": str(n + 1)}]}
        for n in range(count)
    ]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / "train.jsonl")


def test_sft_leaves_an_adapter_that_merges_into_what_was_trained(base, tmp_path):
    config = SftConfig.model_validate(
        {
            "sft": {"max_num_steps": 6, "max_num_epochs": 4},
            "policy": policy(base),
            "cluster": PLACE,
            "data": {"train": {"data_path": chats(tmp_path / "data")}},
        }
    )
    context = plain_context(config, tmp_path / "sft", inputs={"model": base}, outputs={"model": "adapter"})
    supervised.sft_megatron_bridge(context)
    slot = context.outputs["model"]
    assert validate_adapter(slot.path)["rank"] == 8 and slot.attributes["model_type"] == "qwen3"
    assert not (slot.path / "weights").exists()
    merging = plain_context(
        MergeConfig(), tmp_path / "m", inputs={"adapter": slot.path}, outputs={"model": "checkpoint_hf"}
    )
    convert.merge_adapter(merging)
    merged, before = load_hf_weights(merging.outputs["model"].path), load_hf_weights(base.parent / "hf")
    moved = {name for name in before if not torch.equal(merged[name], before[name])}
    assert moved == {name for name in before if name.endswith("proj.weight")}


def test_dpo_starts_at_ln_2_against_its_own_base_and_leaves_an_adapter(base, tmp_path):
    rows = [
        {"prompt": [{"role": "user", "content": f"{n}+1"}], "chosen": str(n + 1), "rejected": "no"} for n in range(16)
    ]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DpoConfig.model_validate(
        {
            "dpo": {"max_num_steps": 3, "max_num_epochs": 4},
            "policy": policy(base),
            "cluster": PLACE,
            "data": {"train": {"data_path": str(tmp_path / "pairs.jsonl")}},
        }
    )
    context = plain_context(config, tmp_path / "dpo", inputs={"policy": base}, outputs={"model": "adapter"})
    supervised.dpo(context)
    rows = [json.loads(line) for line in (tmp_path / "dpo" / "metrics.jsonl").read_text().splitlines()]
    losses = [row["values"]["loss"] for row in rows if "loss" in row["values"]]
    assert losses[0] == pytest.approx(0.693147, abs=1e-6)
    assert losses[-1] < 0.65
    assert validate_adapter(context.outputs["model"].path)["rank"] == 8


@pytest.mark.chain
def test_rlvr_leaves_an_adapter_of_the_policy_that_it_was_given(base, tmp_path):
    rows = [
        {
            "responses_create_params": {"input": [{"role": "user", "content": f"{number}+1"}]},
            "agent_ref": {"type": "responses_api_agents", "name": "instruction_following_simple_agent"},
            # What a policy of random weights does now and then, so that its answers differ in reward.
            "instruction_id_list": ["change_case:english_lowercase"],
            "kwargs": [None],
        }
        for number in range(8)
    ]
    (tmp_path / "rows").mkdir()
    for split in ("train", "heldout"):
        (tmp_path / "rows" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    home, few = tmp_path / "home", ["grpo.max_num_steps=3", "grpo.num_prompts_per_step=4", "heldout.max_prompts=2"]
    inputs = ["--input", f"policy={base}", "--input", f"prompts={tmp_path / 'rows'}"]
    steps("run", "rl/nemo_rl/rlvr", "-c", "tiny_lora", *inputs, *few, "grpo.reward_shaping.enabled=false", home=home)
    adapter = json.loads(steps("artifacts", "show", "rl/nemo_rl/rlvr/model:latest", "--json", home=home))
    (policy_read,) = (read for read in adapter["inputs"] if read["port"] == "policy")
    assert adapter["type"] == "adapter" and adapter["attributes"]["rank"] == 8
    assert adapter["attributes"]["base"] == policy_read["digest"]
    steps("run", "convert/merge_adapter", "--input", "adapter=rl/nemo_rl/rlvr/model:latest", home=home)
    found = json.loads(steps("artifacts", "show", "convert/merge_adapter/model:latest", "--json", home=home))
    merged, before = load_hf_weights(Path(found["path"])), load_hf_weights(base.parent / "hf")
    assert merged.keys() == before.keys()
    moved = {name for name in before if not torch.equal(merged[name], before[name])}
    assert moved == {name for name in before if name.endswith("proj.weight")}


def test_an_adapter_names_its_base_and_has_what_belongs_to_both(tmp_path):
    policy, slot = Mock(), SimpleNamespace(type="adapter", path=tmp_path, attributes={"rank": 8})
    base = SimpleNamespace(digest="digest", attributes={"tokenizer": "t", "reward": 0.5})
    context = SimpleNamespace(outputs={"model": slot}, inputs={"policy": base})
    save_trained(policy, context, "base", port="policy")
    policy.save_adapter.assert_called_once_with(tmp_path, "base", "digest")
    assert slot.attributes == {"rank": 8, "tokenizer": "t"}
