"""Where inputs come from, what is inserted, in which order: the resolver's decisions."""

from dataclasses import replace
from pathlib import Path

import pytest

from nemotron_steps.errors import PlanError
from nemotron_steps.manifest.models import Consumes, Produces, StepManifest, StepTable
from nemotron_steps.manifest.registry import Registry
from nemotron_steps.resolver.plan import SuppliedInput
from nemotron_steps.resolver.problems import PlanProblem, raise_all
from nemotron_steps.resolver.request import request_for_pipeline
from tests.resolver.conftest import STEPS, TYPES
from tests.resolver.worlds import World, pipeline, problems, types_of, wiring, world_of

# -- inputs the user supplies ---------------------------------------------------------------------------------


def test_supplied_inputs_and_inserted_converter(world: World) -> None:
    plan = world.plan("rl", inputs={"prompts": "prompts", "policy": "hf"})
    assert wiring(plan) == {
        "convert/up": {"hf": "hf"},
        "rl": {"prompts": "prompts", "policy": "convert/up.mega"},
    }
    converter = plan.step("convert/up")
    assert converter.inserted and converter.because == "rl.policy needs mega"
    assert plan.goals == ("rl",)
    assert not plan.step("rl").inserted


def test_an_input_stands_in_place_of_other_keys_but_for_those_that_an_override_sets(tmp_path: Path) -> None:
    port = '[[consumes]]\ntype = "rows"\nbind = "rows"\nrequired = false\ninstead_of = ["path", "blend"]\n'
    world = world_of(tmp_path, TYPES, {"prep": f'{port}[[produces]]\ntype = "chats"\n'})
    world.configs["prep", None] = {"path": "a", "blend": "b", "seed": 1}
    world.artifacts["rows"] = SuppliedInput("rows", "rows")
    assert world.plan("prep").step("prep").config == {"path": "a", "blend": "b", "seed": 1}
    fed = world.plan("prep", inputs={"rows": "rows"}, overrides=["blend=mine"]).step("prep")
    assert fed.config == {"path": None, "blend": "mine", "seed": 1}


def test_subtype_is_accepted_and_supertype_is_not(world: World) -> None:
    assert wiring(world.plan("prep/chats", inputs={"source": "chats"})) == {"prep/chats": {"source": "chats"}}
    assert problems(world, "sft", inputs={"chats": "rows"}) == [
        ("E302", "'chats' of sft needs chats, and not every rows is one")
    ]


def test_override_of_the_key_beats_the_named_source_which_beats_the_configs_value(world: World) -> None:
    world.configs["rl", None] = {
        "policy": {"path": "hf"},
        "inputs": {"policy": {"step": "sft"}, "prompts": "prompts"},
    }
    world.configs["sft", None] = {"chats": {"path": "chats"}}
    assert wiring(world.plan("rl"))["rl"]["policy"] == "sft.model"
    assert wiring(world.plan("rl", overrides=["policy.path=mega"]))["rl"]["policy"] == "mega"
    world.configs["rl", None]["inputs"].pop("policy")
    assert wiring(world.plan("rl"))["rl"]["policy"] == "convert/up.mega"


# -- sources named in configs ---------------------------------------------------------------------------------


def tiny(world: World) -> None:
    world.configs["prep/chats", "tiny"] = {}
    world.configs["prep/prompts", "tiny"] = {}
    world.configs["sft", "tiny"] = {"inputs": {"chats": {"step": "prep/chats", "config": "tiny"}}}
    world.configs["judge", "tiny"] = {"inputs": {"chats": {"step": "prep/chats", "config": "tiny"}}}
    world.configs["rlhf", "tiny"] = {
        "judge": {"path": "hub/model"},
        "inputs": {
            "prompts": {"step": "prep/prompts", "config": "tiny"},
            "policy": {"step": "sft", "config": "tiny"},
            "judge": {"step": "judge", "config": "tiny"},
        },
    }


@pytest.mark.parametrize("called", ["prep/chats", "chatting"])
def test_sources_of_sources_are_planned_and_shared(world: World, called: str) -> None:
    tiny(world)
    chats = world.registry.steps["prep/chats"]
    aliased = chats.model_copy(update={"step": chats.step.model_copy(update={"aliases": ("chatting",)})})
    world.registry.steps["prep/chats"] = aliased  # type: ignore[index]
    world.configs["judge", "tiny"]["inputs"]["chats"]["step"] = called
    plan = world.plan("rlhf", config="tiny")
    assert wiring(plan) == {
        "prep/prompts": {},
        "prep/chats": {},
        "sft": {"chats": "prep/chats.chats"},
        "judge": {"chats": "prep/chats.chats"},
        "rlhf": {"prompts": "prep/prompts.prompts", "policy": "sft.model", "judge": "judge.judge"},
    }
    assert plan.goals == ("rlhf",)
    assert plan.step("prep/chats").because == "source of sft.chats"
    assert [c for c in world.composed if c[0] == "prep/chats"] == [("prep/chats", "tiny", ())]


@pytest.mark.parametrize(
    ("source", "code", "what"),
    [
        ({"step": "nowhere"}, "E110", "there is no step 'nowhere'"),
        ({"step": "eval"}, "E301", "'policy' of rl cannot take report"),
        ({"step": "sft", "port": "modle"}, "E305", "sft has no output 'modle'"),
        ({"step": "sft", "ref": "x"}, "E305", "the config's source for 'policy' of rl cannot be read"),
        ("absent", "E400", "there is no artifact 'absent'"),
        ({"step": "sft", "config": "huge"}, "E200", "step 'sft' has no config 'huge'"),
    ],
)
def test_bad_sources(world: World, source: object, code: str, what: str) -> None:
    world.configs["rl", None] = {"inputs": {"prompts": "prompts", "policy": source}}
    world.configs["sft", None] = {"inputs": {"chats": "chats"}}
    world.configs["eval", None] = {"inputs": {"model": "hf", "prompts": "prompts"}}
    assert problems(world, "rl") == [(code, what)]


def test_a_long_chain_of_sources_does_not_recurse() -> None:
    length = 3000
    steps = {
        f"s{i}": StepManifest(
            step=StepTable(id=f"s{i}"), consumes=(Consumes(type="t", required=i > 0),), produces=(Produces(type="t"),)
        )
        for i in range(length)
    }
    configs = {(f"s{i}", None): {"inputs": {"t": {"step": f"s{i - 1}"}}} for i in range(1, length)}
    assert len(World(Registry(steps, {}, types_of(t="")), configs=configs).plan(f"s{length - 1}")) == length


# -- attributes, parameters, placeholders ---------------------------------------------------------------------


SAME = """
[[consumes]]
name = "policy"
type = "mega"
[[consumes]]
name = "judge"
type = "hf"
attributes = { architecture = ["llama", "qwen"] }
[[produces]]
name = "model"
type = "mega"
inherits = "policy"
[[constraints]]
same = ["policy.tokenizer", "judge.tokenizer"]
[[parameters]]
name = "mode"
choices = ["fast", "slow"]
[[parameters]]
name = "level.depth"
"""


@pytest.fixture
def strict(tmp_path: Path) -> World:
    artifacts = {
        "T1": SuppliedInput("T1", "mega", {"tokenizer": "T1"}),
        "T1hf": SuppliedInput("T1hf", "hf", {"tokenizer": "T1", "architecture": "llama"}),
        "T2hf": SuppliedInput("T2hf", "hf", {"tokenizer": "T2", "architecture": "qwen"}),
        "gpt": SuppliedInput("gpt", "hf", {"architecture": "gpt"}),
    }
    steps = {"s": SAME, "then": SAME, "convert/up": STEPS["convert/up"], "convert/down": STEPS["convert/down"]}
    return world_of(tmp_path, TYPES, steps, artifacts=artifacts)


def test_attributes_follow_outputs_that_inherit_them(strict: World) -> None:
    inputs = {"s.policy": "T1", "s.judge": "T1hf", "s#2.judge": "T2hf"}
    assert problems(strict, "s", "s", inputs=inputs) == [
        ("E304", "policy.tokenizer and judge.tokenizer must be the same in s#2")
    ]


def test_parameter_choices_and_existence(strict: World) -> None:
    strict.configs["s", None] = {"mode": "fast"}
    strict.schemas["s"] = {"mode", "level"}
    found = problems(strict, "s", inputs={"policy": "T1", "judge": "T1hf"}, overrides=["mode=medium"])
    assert found == [
        ("E308", "'mode' of s is not one of its choices"),
        ("E308", "parameter 'level.depth' of s is not a key of its config"),
    ]


# -- everything at once ---------------------------------------------------------------------------------------


# -- pipelines ------------------------------------------------------------------------------------------------


def test_pipeline_is_wired_as_it_says(world: World) -> None:
    stages = (
        {"name": "data", "step": "prep/prompts"},
        {"name": "first", "step": "rl", "inputs": {"prompts": "data"}},
        {"name": "second", "step": "rl", "inputs": {"prompts": "data.prompts", "policy": "first"}},
        {"name": "check", "step": "eval", "inputs": {"prompts": {"ref": "prompts"}, "model": "first"}},
    )
    plan = world.plan_pipeline(pipeline(*stages), {"policy": "hf"})
    assert wiring(plan) == {
        "data": {},
        "convert/up": {"hf": "hf"},
        "first": {"prompts": "data.prompts", "policy": "convert/up.mega"},
        "second": {"prompts": "data.prompts", "policy": "first.model"},
        "convert/down": {"mega": "first.model"},
        "check": {"model": "convert/down.hf", "prompts": "prompts"},
    }
    assert plan.name == "p" and plan.goals == ("data", "first", "second", "check")
    assert plan.step("first").because == "stage of p"


def test_pipeline_connects_nothing_by_itself(world: World) -> None:
    stages = ({"name": "data", "step": "prep/prompts"}, {"name": "train", "step": "rl"})
    with pytest.raises(PlanError) as raised:
        world.plan_pipeline(pipeline(*stages))
    assert [(p.code, p.hints[0]) for p in raised.value.problems] == [
        ("E303", "--input prompts=PATH"),
        ("E303", "--input policy=PATH"),
    ]


def test_an_input_is_for_the_stage_whose_source_is_an_earlier_one_that_is_not_run(world: World) -> None:
    stages = (
        {"name": "first", "step": "rl", "inputs": {"prompts": {"ref": "prompts"}}},
        {"name": "second", "step": "rl", "inputs": {"prompts": {"ref": "prompts"}, "policy": "first"}},
        {"name": "third", "step": "rl", "inputs": {"prompts": {"ref": "prompts"}, "policy": "second"}},
    )
    request = request_for_pipeline(pipeline(*stages), inputs={"policy": "mega"})
    first, *rest = request.goals
    plan = world.resolve(replace(request, goals=(replace(first, earlier=True), *rest)))
    assert wiring(plan) == {
        "second": {"prompts": "prompts", "policy": "mega"},
        "third": {"prompts": "prompts", "policy": "second.model"},
    }


# -- converters, circles, counts ------------------------------------------------------------------------------


def test_outputs_are_converted_each_by_itself_and_each_way_once(tmp_path: Path) -> None:
    types = types_of(hf={"mega": "up", "gguf": "export"}, mega="", gguf="")
    steps = {
        "two": "-> first:hf second:hf",
        "use": "a:mega b:mega c:gguf d:mega -> mega",
        "up": "hf -> mega",
        "export": "hf -> gguf",
    }
    wired = {"a": "two.first", "b": "two.second", "c": "two.first", "d": "two.first"}
    stages = ({"name": "two", "step": "two"}, {"name": "use", "step": "use", "inputs": wired})
    plan = world_of(tmp_path, types, steps).plan_pipeline(pipeline(*stages))
    assert wiring(plan) == {
        "two": {},
        "up": {"hf": "two.first"},
        "up#2": {"hf": "two.second"},
        "export": {"hf": "two.first"},
        "use": {"a": "up.mega", "b": "up#2.mega", "c": "export.gguf", "d": "up.mega"},
    }


def test_a_circle_is_told_in_the_direction_in_which_artifacts_go(tmp_path: Path) -> None:
    steps = {"a": "t -> t", "b": "t -> t", "c": "t -> t"}
    configs = {(key, None): {"inputs": {"t": {"step": source}}} for key, source in ("ab", "bc", "ca")}
    with pytest.raises(PlanError) as caught:
        world_of(tmp_path, types_of(t=""), steps, configs=configs).plan("a")
    (problem,) = caught.value.problems
    assert problem.chain == ("a", "c", "b", "a")  # type: ignore[attr-defined]
    assert sorted(problem.hints) == ["steps show a", "steps show b", "steps show c"]
    assert problem.what == "the inputs of a come, in the end, from itself"


def test_one_problem_is_counted_as_one_and_none_raises_nothing() -> None:
    raise_all([], "cannot plan 'x'")
    for count, said in ((1, "cannot plan 'x': 1 problem, nothing"), (2, "cannot plan 'x': 2 problems, nothing")):
        with pytest.raises(PlanError, match=said):
            raise_all([PlanProblem("it")] * count, "cannot plan 'x'")
