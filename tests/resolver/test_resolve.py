"""Where inputs come from, what is inserted, in which order: the resolver's decisions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nemotron_steps.errors import PlanError
from nemotron_steps.manifest.models import Consumes, PipelineManifest, Produces, StepManifest, StepTable
from nemotron_steps.manifest.registry import Registry
from nemotron_steps.resolver.plan import SuppliedInput
from tests.resolver.worlds import World, types_of, wiring, world_of

TYPES = types_of(
    rows="",
    chats="rows",
    prompts="rows",
    hf={"mega": "convert/up"},
    mega={"hf": "convert/down"},
    judge_hf=("hf", {}),
    report="",
)
STEPS = {
    "prep/chats": "source:rows? -> chats",
    "prep/prompts": "-> prompts",
    "sft": "chats model:mega? -> model:mega",
    "sft_hf": "chats -> model:hf",
    "judge": "chats -> judge:judge_hf",
    "rl": "prompts policy:mega -> model:mega",
    "rlhf": """
[[consumes]]
type = "prompts"
bind = { "data.train" = "train.jsonl", "data.val" = "val.jsonl" }
[[consumes]]
name = "policy"
type = "mega"
bind = "policy.path"
[[consumes]]
name = "judge"
type = "hf"
bind = "judge.path"
auto = "judge_hf"
[[produces]]
name = "model"
type = "mega"
inherits = "policy"
""",
    "eval": "model:hf prompts -> report",
    "convert/up": "hf -> mega",
    "convert/down": "mega -> hf",
}


@pytest.fixture
def world(tmp_path: Path) -> World:
    artifacts = {
        "rows": SuppliedInput("rows", "rows"),
        "chats": SuppliedInput("chats", "chats"),
        "prompts": SuppliedInput("prompts", "prompts"),
        "hf": SuppliedInput("hf", "hf", {"tokenizer": "T1"}),
        "mega": SuppliedInput("mega", "mega", {"tokenizer": "T1"}),
        "judge": SuppliedInput("judge", "judge_hf", {"tokenizer": "T2"}),
        "hub/model": SuppliedInput("hub/model", None),
    }
    return world_of(tmp_path, TYPES, STEPS, artifacts=artifacts)


def problems(world: World, *steps: str, **kwargs: object) -> list[tuple[str, str]]:
    """(code, sentence) of every problem of a plan that must fail."""
    with pytest.raises(PlanError) as raised:
        world.plan(*steps, **kwargs)  # type: ignore[arg-type]
    return [(p.code, p.what) for p in raised.value.problems]


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


def test_the_same_artifact_is_converted_once(world: World) -> None:
    plan = world.plan("rl", "rl", inputs={"rl.prompts": "prompts", "rl#2.prompts": "prompts", "rl.policy": "hf"})
    assert [step.key for step in plan] == ["convert/up", "rl", "rl#2"]
    assert wiring(plan)["rl#2"]["policy"] == "convert/up.mega"


def test_one_path_for_inputs_of_two_types_is_looked_at_as_each(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a path is may depend on what is wanted: for a type of a pack the user's word counts."""
    monkeypatch.setattr(world, "describe", lambda ref, wanted: SuppliedInput(ref, wanted))
    plan = world.plan("rlhf", inputs={"prompts": "./it", "policy": "./it", "judge": "./it"})
    assert wiring(plan) == {"rlhf": {"prompts": "./it", "policy": "./it", "judge": "./it"}}


def test_type_of_a_hub_name_is_trusted(world: World) -> None:
    plan = world.plan("rlhf", inputs={"prompts": "prompts", "policy": "mega", "judge": "hub/model"})
    assert wiring(plan)["rlhf"]["judge"] == "hub/model"


def test_subtype_is_accepted_and_supertype_is_not(world: World) -> None:
    assert wiring(world.plan("prep/chats", inputs={"source": "chats"})) == {"prep/chats": {"source": "chats"}}
    assert problems(world, "sft", inputs={"chats": "rows"}) == [
        ("E302", "'chats' of sft needs chats, and not every rows is one")
    ]


def test_a_type_may_refuse_conversion(world: World) -> None:
    found = problems(world, "rl", inputs={"prompts": "prompts", "policy": "judge"})
    assert found == [("E301", "'policy' of rl cannot take judge_hf")]


def test_a_bound_config_key_supplies_the_input(world: World) -> None:
    plan = world.plan("rl", overrides=["prompts.path=prompts", "policy.path=mega"])
    policy = plan.step("rl").inputs["policy"]
    assert isinstance(policy, SuppliedInput)
    assert (policy.ref, policy.type, policy.config_key) == ("mega", "mega", "policy.path")


def test_input_flag_beats_the_configs_sources(world: World) -> None:
    world.configs["rl", None] = {"policy": {"path": "hf"}, "inputs": {"policy": {"step": "sft"}, "prompts": "prompts"}}
    plan = world.plan("rl", inputs={"policy": "mega"})
    assert wiring(plan) == {"rl": {"prompts": "prompts", "policy": "mega"}}


def test_input_flag_beside_an_override_of_its_key_is_a_contradiction(world: World) -> None:
    world.configs["rl", None] = {"inputs": {"prompts": "prompts"}}
    found = problems(world, "rl", inputs={"policy": "mega"}, overrides=["policy.path=hf"])
    assert found == [("E306", "'policy' of rl is given twice")]


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


def test_a_placeholder_supplies_nothing(world: World) -> None:
    world.configs["rl", None] = {"policy": {"path": "/path/to/sft/checkpoint"}, "prompts": {"path": "???"}}
    assert problems(world, "rl") == [
        ("E303", "nothing feeds 'prompts' of rl"),
        ("E303", "nothing feeds 'policy' of rl"),
    ]
    assert wiring(world.plan("rl", inputs={"prompts": "prompts", "policy": "mega"}))["rl"]["policy"] == "mega"


def test_several_bound_keys(world: World) -> None:
    world.configs["rlhf", None] = {"data": {"train": "prompts", "val": None}, "policy": {"path": "mega"}}
    plan = world.plan("rlhf", inputs={"judge": "judge"})
    prompts = plan.step("rlhf").inputs["prompts"]
    assert isinstance(prompts, SuppliedInput) and prompts.config_key == "data.train"


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


def test_sources_of_sources_are_planned_and_shared(world: World) -> None:
    tiny(world)
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


@pytest.mark.parametrize("overrides", [["seed=2"], "seed=2"])
def test_different_overrides_are_different_steps(world: World, overrides: object) -> None:
    tiny(world)
    world.configs["judge", "tiny"]["inputs"]["chats"]["overrides"] = overrides
    plan = world.plan("rlhf", config="tiny")
    assert wiring(plan)["sft"]["chats"] == "prep/chats.chats"
    assert wiring(plan)["judge"]["chats"] == "prep/chats@tiny.chats"
    assert plan.step("prep/chats@tiny").overrides == ("seed=2",)


def test_supplying_an_input_drops_the_steps_that_would_make_it(world: World) -> None:
    tiny(world)
    plan = world.plan("rlhf", config="tiny", inputs={"policy": "hf"})
    assert [step.key for step in plan] == ["prep/prompts", "convert/up", "prep/chats", "judge", "rlhf"]


def test_input_of_a_step_that_a_config_asked_for(world: World) -> None:
    tiny(world)
    plan = world.plan("rlhf", config="tiny", inputs={"sft.chats": "chats"})
    assert wiring(plan)["sft"]["chats"] == "chats"
    assert wiring(plan)["judge"]["chats"] == "prep/chats.chats"


def test_a_listed_step_is_the_one_a_config_means(world: World) -> None:
    tiny(world)
    plan = world.plan("sft", "rlhf", config="tiny")
    assert [step.key for step in plan] == ["prep/chats", "sft", "prep/prompts", "judge", "rlhf"]
    assert plan.warnings == ()


def test_source_of_another_type_is_converted(world: World) -> None:
    world.configs["rl", None] = {"inputs": {"prompts": "prompts", "policy": {"step": "sft_hf"}}}
    world.configs["sft_hf", None] = {"inputs": {"chats": {"ref": "chats"}}}
    assert wiring(world.plan("rl"))["rl"]["policy"] == "convert/up.mega"


@pytest.mark.parametrize(
    ("source", "code", "what"),
    [
        ({"step": "nowhere"}, "E110", "there is no step 'nowhere'"),
        ({"step": "eval"}, "E301", "'policy' of rl cannot take report"),
        ({"step": "sft", "port": "modle"}, "E305", "sft has no output 'modle'"),
        ({"config": "tiny"}, "E305", "the config's source for 'policy' of rl cannot be read"),
        ({"step": "sft", "ref": "x"}, "E305", "the config's source for 'policy' of rl cannot be read"),
        ({"step": "sft", "confg": "tiny"}, "E305", "the config's source for 'policy' of rl cannot be read"),
        ({"step": "sft", "overrides": {"a": 1}}, "E305", "the config's source for 'policy' of rl cannot be read"),
        (3, "E305", "the config's source for 'policy' of rl cannot be read"),
        ("absent", "E400", "there is no artifact 'absent'"),
        ({"step": "sft", "config": "huge"}, "E200", "step 'sft' has no config 'huge'"),
    ],
)
def test_bad_sources(world: World, source: object, code: str, what: str) -> None:
    world.configs["rl", None] = {"inputs": {"prompts": "prompts", "policy": source}}
    world.configs["sft", None] = {"inputs": {"chats": "chats"}}
    world.configs["eval", None] = {"inputs": {"model": "hf", "prompts": "prompts"}}
    assert problems(world, "rl") == [(code, what)]


def test_a_source_for_a_port_that_is_not_there(world: World) -> None:
    world.configs["rl", None] = {"inputs": {"prompts": "prompts", "polcy": "mega", "policy": "mega"}}
    assert problems(world, "rl") == [("E305", "rl has no input 'polcy'")]


def test_sources_in_a_circle(world: World) -> None:
    world.configs["rl", None] = {"inputs": {"prompts": "prompts", "policy": {"step": "sft"}}}
    world.configs["sft", None] = {"inputs": {"chats": "chats", "model": {"step": "rl"}}}
    with pytest.raises(PlanError) as raised:
        world.plan("rl")
    (problem,) = raised.value.problems
    assert problem.code == "E311"
    assert problem.chain == ("rl", "sft", "rl")  # type: ignore[attr-defined]


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


# -- lists of steps -------------------------------------------------------------------------------------------


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


def test_bare_input_is_for_the_step_that_nothing_else_feeds(world: World) -> None:
    plan = world.plan("rl", "rlhf", inputs={"policy": "mega", "prompts": "prompts", "judge": "judge"})
    assert wiring(plan)["rl"]["policy"] == "mega"
    assert wiring(plan)["rlhf"]["policy"] == "rl.model"
    assert wiring(plan)["rlhf"]["prompts"] == "prompts"


def test_input_names_that_fit_nowhere(world: World) -> None:
    inputs = {"prompts": "prompts", "policy": "hf", "polcy": "x", "rl.polcy": "x", "slf.chats": "x"}
    inputs["convert/up.hf"] = "x"  # inserted, so not the user's to feed
    assert problems(world, "rl", inputs=inputs) == [
        ("E305", "no step of the request has an input 'polcy'"),
        ("E305", "rl has no input 'polcy'"),
        ("E305", "no step of the plan is called 'slf'"),
        ("E305", "no step of the plan is called 'convert/up'"),
    ]


def test_two_placeholders_of_one_step_are_two_problems(world: World) -> None:
    world.configs["prep/prompts", None] = {"a": "/path/to/rows.jsonl", "b": "/path/to/rows.jsonl"}
    assert problems(world, "prep/prompts") == [
        ("E307", "'a' of prep/prompts still has to be filled in"),
        ("E307", "'b' of prep/prompts still has to be filled in"),
    ]


def test_of_a_named_steps_outputs_the_one_with_the_fewest_conversions_is_taken(tmp_path: Path) -> None:
    types = types_of(a={"b": "a2b"}, b={"c": "b2c"}, c="")
    steps = {"make": "-> first:a second:b", "use": "c -> c", "a2b": "a -> b", "b2c": "b -> c"}
    configs = {("use", None): {"inputs": {"c": {"step": "make"}}}}
    plan = world_of(tmp_path, types, steps, configs=configs).plan("use")
    assert wiring(plan) == {"make": {}, "b2c": {"b": "make.second"}, "use": {"c": "b2c.c"}}


def test_two_outputs_of_one_type_are_ambiguous(tmp_path: Path) -> None:
    world = world_of(tmp_path, types_of(t=""), {"two": "-> a:t b:t", "use": "t -> t", "pick": "t -> t"})
    assert problems(world, "two", "use") == [("E306", "several outputs could feed 't' of use")]
    world.configs["pick", None] = {"inputs": {"t": {"step": "two", "port": "b"}}}
    assert wiring(world.plan("pick"))["pick"]["t"] == "two.b"


def test_fewest_conversions_choose_between_outputs(tmp_path: Path) -> None:
    types = types_of(a={"b": "a2b"}, b={"c": "b2c"}, c="")
    world = world_of(tmp_path, types, {"both": "-> a b", "use": "c -> c", "a2b": "a -> b", "b2c": "b -> c"})
    assert [s.key for s in world.plan("both", "use")] == ["both", "b2c", "use"]


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


# -- pipelines ------------------------------------------------------------------------------------------------


def pipeline(*stages: dict[str, object]) -> PipelineManifest:
    return PipelineManifest.model_validate({"pipeline": {"name": "p"}, "stages": stages})


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
        ("E303", "steps run p --input prompts=PATH"),
        ("E303", "steps run p --input policy=PATH"),
    ]


def test_a_pipelines_problems_are_answered_in_its_own_terms(world: World) -> None:
    world.configs["rl", None] = {"grpo": {"num_prompts_per_step": 2, "num_generations_per_prompt": 2}}
    world.configs["rl", None]["policy"] = {"train_global_batch_size": 3}
    stages = (
        {"name": "first", "step": "rl"},
        {"name": "then", "step": "rl", "inputs": {"prompts": {"ref": "prompts"}}},
        {"name": "last", "step": "sft", "inputs": {"model": "then"}},
    )
    with pytest.raises(PlanError) as raised:
        world.plan_pipeline(pipeline(*stages), {"first.policy": "mega", "first.prompts": "prompts"})
    assert (
        raised.value.problems[1].hints[0]
        == "steps run p --input first.policy=mega --input first.prompts=prompts --input chats=PATH"
    )
    assert [(p.code, p.hints[-1]) for p in raised.value.problems] == [
        ("E303", 'inputs = { policy = "first" }   # in [[stages]] name = "then"'),
        ("E303", "last.chats.path=PATH"),
        ("E309", "first.policy.train_global_batch_size=4"),
        ("E309", "then.policy.train_global_batch_size=4"),
    ]


def test_pipeline_mistakes_come_together(world: World) -> None:
    stages = (
        {"name": "data", "step": "prep/prompts"},
        {"name": "gone", "step": "no/such"},
        {"name": "train", "step": "rl", "config": "huge"},
        {"name": "use", "step": "rl", "inputs": {"prompts": "gone", "policy": "data", "wrong": "data"}},
    )
    with pytest.raises(PlanError) as raised:
        world.plan_pipeline(pipeline(*stages))
    assert [(p.code, p.what) for p in raised.value.problems] == [
        ("E110", "there is no step 'no/such'"),
        ("E200", "train: step 'rl' has no config 'huge'"),
        ("E305", "use has no input 'wrong'"),
        ("E301", "'policy' of use cannot take prompts"),
    ]


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
    steps = {"s": SAME, "convert/up": STEPS["convert/up"], "convert/down": STEPS["convert/down"]}
    return world_of(tmp_path, TYPES, steps, artifacts=artifacts)


def test_same_attribute(strict: World) -> None:
    assert strict.plan("s", inputs={"policy": "T1", "judge": "T1hf"})
    found = problems(strict, "s", inputs={"policy": "T1", "judge": "T2hf"})
    assert found == [("E304", "policy.tokenizer and judge.tokenizer must be the same in s")]


def test_unknown_attributes_pass(strict: World) -> None:
    strict.artifacts["plain"] = SuppliedInput("plain", "hf", {"architecture": "llama"})
    assert strict.plan("s", inputs={"policy": "T1", "judge": "plain"})


def test_required_attribute(strict: World) -> None:
    found = problems(strict, "s", inputs={"policy": "T1", "judge": "gpt"})
    assert found == [("E304", "'judge' of s needs another architecture")]


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
        ("E308", "'mode' of s is none of its choices"),
        ("E308", "parameter 'level.depth' of s is no key of its config"),
    ]


def test_placeholders_are_found_wherever_they_are(strict: World) -> None:
    strict.configs["s", None] = {"a": {"b": "/path/to/file", "c": ["x", "???"]}, "ok": "/real/path/to/file", "t": "<a>"}
    with pytest.raises(PlanError) as raised:
        strict.plan("s", inputs={"policy": "T1", "judge": "T1hf"})
    assert [(p.code, p.hints[0]) for p in raised.value.problems] == [("E307", "a.b=VALUE"), ("E307", "a.c=VALUE")]


# -- everything at once ---------------------------------------------------------------------------------------


def test_all_problems_at_once_and_as_json(world: World) -> None:
    with pytest.raises(PlanError) as raised:
        world.plan("no/such", "rl", "eval", inputs={"rl.policy": "judge", "eval.prompts": "absent"})
    error = raised.value
    assert [p.code for p in error.problems] == ["E110", "E301", "E303", "E400"]
    document = json.loads(json.dumps(error.to_dict()))
    assert [p["code"] for p in document["problems"]] == ["E110", "E301", "E303", "E400"]
    mismatch = document["problems"][1]
    assert mismatch["chain"] == ["judge", "rl.policy"]
    assert mismatch["where"] and mismatch["expected"] and mismatch["found"]
    assert error.exit_code == 2


def test_a_plan_as_json(world: World) -> None:
    plan = world.plan("rl", inputs={"prompts": "prompts", "policy": "hf"})
    document = json.loads(json.dumps(plan.to_dict(with_config=True)))
    assert document["goals"] == ["rl"]
    assert [s["key"] for s in document["steps"]] == ["convert/up", "rl"]
    assert document["steps"][0]["inputs"]["hf"] == {"ref": "hf", "type": "hf", "attributes": {"tokenizer": "T1"}}
    assert document["steps"][1]["inputs"]["policy"] == {"step": "convert/up", "port": "mega"}
    assert document["steps"][1]["produces"] == {"model": "mega"}
    assert plan.step("rl").key == "rl"
    with pytest.raises(KeyError):
        plan.step("absent")
