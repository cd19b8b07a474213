"""A list of steps is connected by type: which output feeds which input, and which conversions are inserted."""

from __future__ import annotations

from pathlib import Path

from nemotron_steps.manifest.models import Consumes
from nemotron_steps.resolver.plan import StepOutput, SuppliedInput
from nemotron_steps.resolver.sources import Chain, Produced
from tests.resolver.worlds import World, pipeline, problems, types_of, wiring, world_of


def test_a_list_is_connected_by_type(world: World) -> None:
    plan = world.plan("prep/chats", "sft", "prep/prompts", "rl", "eval")
    assert wiring(plan) == {
        "prep/chats": {},
        "sft": {"chats": "prep/chats.chats"},
        "prep/prompts": {},
        "rl": {"prompts": "prep/prompts.prompts", "policy": "sft.model"},
        "convert/down": {"mega": "rl.model"},
        "eval": {"model": "convert/down.hf", "prompts": "prep/prompts.prompts"},
    }
    assert plan.warnings == ()


def test_nearest_producer_wins_even_if_it_must_be_converted(world: World) -> None:
    plan = world.plan("prep/chats", "sft", "sft_hf", "rl", inputs={"prompts": "prompts"})
    assert wiring(plan)["rl"]["policy"] == "convert/up.mega"
    assert wiring(plan)["convert/up"]["hf"] == "sft_hf.model"
    assert plan.warnings == ("nothing in this plan reads what sft produces",)


def test_a_converter_in_the_list_is_looked_through(world: World) -> None:
    plan = world.plan("sft", "convert/down", "rl", inputs={"chats": "chats", "prompts": "prompts"})
    assert wiring(plan)["rl"]["policy"] == "sft.model"
    assert wiring(plan)["convert/down"] == {"mega": "sft.model"}


def test_optional_ports_take_only_what_fits_as_it_is(world: World) -> None:
    hf_first = world.plan("sft_hf", "sft", inputs={"sft_hf.chats": "chats", "sft.chats": "chats"})
    assert wiring(hf_first)["sft"] == {"chats": "chats"}
    mega_first = world.plan("rl", "sft", inputs={"prompts": "prompts", "policy": "mega", "chats": "chats"})
    assert wiring(mega_first)["sft"]["model"] == "rl.model"


def test_a_port_may_ask_for_a_narrower_type_in_lists(world: World) -> None:
    """Standing before rlhf makes a model the policy, and a judge the judge; never the other way round."""
    inputs = {"prompts": "prompts", "sft_hf.chats": "chats", "judge.chats": "chats"}
    plan = world.plan("sft_hf", "judge", "rlhf", inputs=inputs)
    assert wiring(plan)["rlhf"] == {"prompts": "prompts", "policy": "convert/up.mega", "judge": "judge.judge"}
    assert wiring(plan)["convert/up"] == {"hf": "sft_hf.model"}
    assert problems(world, "judge", "rlhf", inputs={"prompts": "prompts", "judge.chats": "chats"}) == [
        ("E303", "nothing feeds 'policy' of rlhf")
    ]


def test_of_a_named_steps_outputs_the_one_with_the_fewest_conversions_is_taken(tmp_path: Path) -> None:
    types = types_of(a={"b": "a2b"}, b={"c": "b2c"}, c="")
    steps = {"make": "-> first:a second:b", "use": "c -> c", "a2b": "a -> b", "b2c": "b -> c"}
    configs = {("use", None): {"inputs": {"c": {"step": "make"}}}}
    plan = world_of(tmp_path, types, steps, configs=configs).plan("use")
    assert wiring(plan) == {"make": {}, "b2c": {"b": "make.second"}, "use": {"c": "b2c.c"}}


def test_chain_of_conversions(tmp_path: Path) -> None:
    types = types_of(a={"b": "a2b"}, b={"c": "b2c"}, c="d", d="", sub="a")
    steps = {"make": "-> sub", "use": "d -> d", "a2b": "a -> b", "b2c": "b -> c"}
    plan = world_of(tmp_path, types, steps).plan("make", "use")
    assert [s.key for s in plan] == ["make", "a2b", "b2c", "use"]
    assert all(s.inserted == (s.key in ("a2b", "b2c")) for s in plan)


def test_a_converter_uses_the_consumers_config_where_it_has_it(world: World, tmp_path: Path) -> None:
    manifest = world.registry.step("convert/up")
    assert manifest.config_dir is not None
    manifest.config_dir.mkdir(parents=True)
    (manifest.config_dir / "tiny.yaml").write_text("{}\n")
    world.configs["convert/up", "tiny"] = {}
    world.configs["rl", "tiny"] = {}
    plan = world.plan("rl", config="tiny", inputs={"prompts": "prompts", "policy": "hf"})
    assert plan.step("convert/up").config_name == "tiny"
    (manifest.config_dir / "tiny.yaml").unlink()
    plan = world.plan("rl", config="tiny", inputs={"prompts": "prompts", "policy": "hf"})
    assert plan.step("convert/up").config_name == "default"


def test_consumers_of_different_configs_share_a_converter_only_where_it_has_neither(
    world: World, tmp_path: Path
) -> None:
    folder = world.registry.step("convert/up").config_dir
    assert folder is not None
    folder.mkdir(parents=True)
    for name in ("tiny", "large"):
        world.configs["rl", name] = {"inputs": {"policy": "hf", "prompts": "prompts"}}
        world.configs["convert/up", name] = {}
        (folder / f"{name}.yaml").write_text("{}\n")
    stages = ({"name": name, "step": "rl", "config": name} for name in ("tiny", "large"))
    plan = world.plan_pipeline(pipeline(*stages))
    converters = {name: plan.step(wiring(plan)[name]["policy"].partition(".")[0]) for name in ("tiny", "large")}
    assert {name: step.config_name for name, step in converters.items()} == {"tiny": "tiny", "large": "large"}
    for name in ("tiny", "large"):
        (folder / f"{name}.yaml").unlink()
    stages = ({"name": name, "step": "rl", "config": name} for name in ("tiny", "large"))
    plan = world.plan_pipeline(pipeline(*stages))
    assert [step.key for step in plan] == ["convert/up", "tiny", "large"]


def test_a_conversion_is_looked_through_only_for_a_port_that_takes_what_was_converted(world: World) -> None:
    before = (SuppliedInput("hf"), "hf")
    chain = Chain(world.registry.types, converted_from={"convert/up": before})
    produced = Produced(StepOutput("convert/up", "mega"), "mega")
    seen = {name: chain.look_through(produced, Consumes(type=name)) for name in ("hf", "mega", "report")}
    assert seen == {"hf": before, "mega": (produced.source, "mega"), "report": (produced.source, "mega")}
