"""A step's output is an adapter where its config trains one, and is merged where a whole checkpoint is wanted."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.resolver.worlds import World, type_at, types_of, wiring, world_of

SFT = """
[[consumes]]
name = "model"
type = "mega"
bind = "policy.checkpoint"
[[produces]]
name = "model"
type = "mega"
becomes = { "policy.peft.enabled" = "adapter" }
"""


@pytest.fixture
def lora_world(tmp_path: Path, world: World) -> World:
    types = types_of(mega="", hf={"mega": "convert/up"}, adapter={"hf": "merge"})
    steps = {
        "sft": SFT,
        "rl": "policy:mega -> model:mega",
        "convert/up": "hf -> mega",
        "merge": "adapter base:hf? -> model:hf",
    }
    return world_of(
        tmp_path,
        types,
        steps,
        configs={("sft", None): {"policy": {"peft": {"enabled": True}}}, ("rl", None): {}},
        artifacts={"mega": world.artifacts["mega"]},
    )


def test_an_adapter_is_merged_and_converted_on_its_way_to_a_checkpoint(lora_world: World) -> None:
    plan = lora_world.plan("sft", "rl", inputs={"model": "mega"})
    assert plan.step("sft").produces == {"model": "adapter"}
    assert wiring(plan)["merge"] == {"adapter": "sft.model"}
    assert wiring(plan)["convert/up"] == {"hf": "merge.model"}
    assert wiring(plan)["rl"] == {"policy": "convert/up.mega"}
    assert type_at(plan, plan.step("rl"), "policy") == "mega"


def test_without_adapters_the_output_is_what_the_manifest_says(lora_world: World) -> None:
    lora_world.configs["sft", None] = {"policy": {"peft": {"enabled": False}}}
    plan = lora_world.plan("sft", "rl", inputs={"model": "mega"})
    assert plan.step("sft").produces == {"model": "mega"}
    assert wiring(plan)["rl"] == {"policy": "sft.model"}
