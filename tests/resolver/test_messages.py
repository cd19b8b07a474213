"""What a user reads, word for word. To accept new wording: UPDATE_GOLDEN=1 pytest tests/resolver/test_messages.py"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from nemotron_steps.errors import PlanError
from nemotron_steps.resolver.plan import Plan, SuppliedInput
from tests.resolver.conftest import STEPS, TYPES
from tests.resolver.test_resolve import tiny
from tests.resolver.worlds import World, pipeline, world_of

GOLDEN = Path(__file__).parent / "golden"

EXTRA_STEPS = {
    "two": "-> first:mega second:mega",
    "strict": """
[[consumes]]
name = "policy"
type = "mega"
description = "policy to align"
attributes = { architecture = ["llama", "qwen3"] }
[[consumes]]
name = "prompts"
type = "prompts"
[[produces]]
name = "model"
type = "mega"
[[parameters]]
name = "mode"
choices = ["fast", "slow"]
[[parameters]]
name = "grpo.num_generation_per_prompt"
[[constraints]]
description = "the prompts were made for another tokenizer than the policy's"
same = ["policy.tokenizer", "prompts.tokenizer"]
""",
}


def wrong_direction(world: World) -> Plan:
    return world.plan("prep/chats", "sft", inputs={"sft.chats": "rows"})


def wrong_chain(world: World) -> Plan:
    return world.plan("prep/chats", "rl", inputs={"prompts": "prompts"})


def missing_inputs(world: World) -> Plan:
    return world.plan("rl", config=None)


def missing_in_pipeline(world: World) -> Plan:
    return world.plan_pipeline(pipeline({"name": "first", "step": "rl"}, {"name": "then", "step": "rl"}))


def unknown_names(world: World) -> Plan:
    return world.plan("prep/promts", "rl", inputs={"polcy": "mega", "sft.chats": "chats", "rl.prompt": "prompts"})


def ambiguous(world: World) -> Plan:
    return world.plan("two", "rl", inputs={"prompts": "prompts"})


def given_twice(world: World) -> Plan:
    return world.plan("rl", inputs={"prompts": "prompts", "policy": "mega"}, overrides=["policy.path=hf"])


def attributes_and_parameters(world: World) -> Plan:
    world.configs["strict", None] = {"mode": "medium", "grpo": {"num_generations_per_prompt": 8}}
    world.schemas["strict"] = {"mode", "grpo.num_generations_per_prompt"}
    return world.plan("strict", inputs={"policy": "gpt", "prompts": "prompts"})


def placeholders(world: World) -> Plan:
    world.configs["rl", None] = {"logger": {"dir": "/path/to/logs"}}
    return world.plan("rl", inputs={"prompts": "prompts", "policy": "mega"})


def one_placeholder_in_several_stages(world: World) -> Plan:
    world.configs["prep/prompts", None] = {"rows": {"path": "/path/to/rows.jsonl"}}
    stages = [{"name": name, "step": "prep/prompts"} for name in ("one", "two", "three")]
    return world.plan_pipeline(pipeline(*stages))


def missing_input_of_a_request_with_overrides(world: World) -> Plan:
    return world.plan("rl", inputs={"prompts": "prompts"}, overrides=["seed=7", "name='a b'"])


def circle(world: World) -> Plan:
    world.configs["rl", None] = {"inputs": {"prompts": "prompts", "policy": {"step": "sft"}}}
    world.configs["sft", None] = {"inputs": {"chats": "chats", "model": {"step": "rl"}}}
    return world.plan("rl")


def arithmetic(world: World) -> Plan:
    world.configs["rl", None] = {
        "grpo": {"num_prompts_per_step": 10, "num_generations_per_prompt": 8},
        "loss_fn": {"force_on_policy_ratio": True},
        "policy": {"train_global_batch_size": 64, "megatron_cfg": {"enabled": True, "tensor_model_parallel_size": 16}},
        "cluster": {"num_nodes": 3, "gpus_per_node": 8},
    }
    return world.plan("rl", inputs={"prompts": "prompts", "policy": "mega"}, profile={"nodes": 2})


def refused_conversion(world: World) -> Plan:
    return world.plan("rl", inputs={"prompts": "prompts", "policy": "judge"})


def bad_source(world: World) -> Plan:
    tiny(world)
    world.configs["rlhf", "tiny"]["inputs"]["policy"] = {"step": "sft", "confg": "tiny"}
    world.configs["rlhf", "tiny"]["inputs"]["prompts"] = {"step": "prep/prompts", "config": "tiny", "port": "prompt"}
    return world.plan("rlhf", config="tiny")


CASES: tuple[Callable[[World], Plan], ...] = (
    wrong_direction,
    wrong_chain,
    missing_inputs,
    missing_in_pipeline,
    unknown_names,
    ambiguous,
    given_twice,
    attributes_and_parameters,
    placeholders,
    one_placeholder_in_several_stages,
    missing_input_of_a_request_with_overrides,
    circle,
    arithmetic,
    refused_conversion,
    bad_source,
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_message(case: Callable[[World], Plan], tmp_path: Path) -> None:
    artifacts = {
        "rows": SuppliedInput("rows", "rows"),
        "chats": SuppliedInput("chats", "chats"),
        "prompts": SuppliedInput("prompts", "prompts", {"tokenizer": "sha256:1111"}),
        "mega": SuppliedInput("mega", "mega"),
        "judge": SuppliedInput("judge", "judge_hf"),
        "gpt": SuppliedInput("gpt", "mega", {"architecture": "gpt2", "tokenizer": "sha256:2222"}),
    }
    world = world_of(tmp_path, TYPES, {**STEPS, **EXTRA_STEPS}, artifacts=artifacts)
    with pytest.raises(PlanError) as raised:
        case(world)
    text = raised.value.render().replace(f"{tmp_path}/", "") + "\n"
    path = GOLDEN / f"{case.__name__}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text()
