"""Which output of a list of steps a port is connected to."""

from pathlib import Path

import pytest

from nemotron_steps.manifest.models import Consumes
from nemotron_steps.resolver.plan import SuppliedInput
from nemotron_steps.resolver.sources import Chain
from tests.resolver.worlds import MANY, World, pipeline, problems, types_of, wiring, world_of

TYPES = types_of(model="", hf=("model", {"mega": "up"}), mega="model", judge="hf", rows="", notes="", log="")
STEPS = {
    "rows": "-> rows",
    "hf": "-> hf",
    "mega": "-> mega",
    "both": "-> notes mega hf",
    "judge": "-> judge",
    "log": "-> log",
}


def chosen(tmp_path: Path, port: Consumes, *steps: str) -> list[str]:
    registry = world_of(tmp_path, TYPES, STEPS).registry
    chain = Chain(TYPES)
    for step in steps:
        chain.add(step, registry.step(step))
    return [f"{source.step_key}.{source.port}" for source, _ in chain.candidates(port)]


NEEDED, OPTIONAL = Consumes(type="mega"), Consumes(type="mega", required=False)


@pytest.mark.parametrize(
    ("port", "steps", "found"),
    [
        (NEEDED, ("mega", "hf", "rows"), ["hf.hf"]),
        (NEEDED, ("mega", "both"), ["both.mega"]),
        (NEEDED, ("rows",), []),
        (NEEDED, (), []),
        (OPTIONAL, ("mega", "hf"), ["mega.mega"]),
        (OPTIONAL, ("mega", "rows", "log", "hf"), ["mega.mega"]),
        (OPTIONAL, ("rows", "log", "hf"), []),
        (OPTIONAL, ("hf",), []),
        (Consumes(type="mega", auto=False), ("mega",), []),
        (Consumes(type="hf", auto="judge"), ("judge", "hf"), ["judge.judge"]),
        (Consumes(type="hf", auto="judge"), ("hf",), []),
        (Consumes(type="model"), ("both",), ["both.mega", "both.hf"]),
    ],
)
def test_the_nearest_step_and_of_its_outputs_the_one_with_the_fewest_conversions(
    port: Consumes, steps: tuple[str, ...], found: list[str], tmp_path: Path
) -> None:
    assert chosen(tmp_path, port, *steps) == found


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


def test_a_port_may_ask_for_a_narrower_type_in_lists(world: World) -> None:
    """Standing before rlhf makes a model the policy, and a judge the judge; never the other way round."""
    inputs = {"prompts": "prompts", "sft_hf.chats": "chats", "judge.chats": "chats"}
    plan = world.plan("sft_hf", "judge", "rlhf", inputs=inputs)
    assert wiring(plan)["rlhf"] == {"prompts": "prompts", "policy": "convert/up.mega", "judge": "judge.judge"}
    assert wiring(plan)["convert/up"] == {"hf": "sft_hf.model"}
    assert problems(world, "judge", "rlhf", inputs={"prompts": "prompts", "judge.chats": "chats"}) == [
        ("E303", "nothing feeds 'policy' of rlhf")
    ]


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


@pytest.fixture
def small(tmp_path: Path) -> World:
    types = types_of(hf={"mega": "up"}, mega="", rows="", report="", judge="hf")
    steps = {
        "train": "rows base:mega? -> model:mega",
        "tune": "rows base:mega -> model:mega",
        "judge": "rows -> judge",
        "compare": MANY,
        "up": "hf -> mega",
        "make": "-> rows",
    }
    return world_of(tmp_path, types, steps, artifacts={name: SuppliedInput(name, name) for name in types.types})


def test_a_bare_input_goes_to_every_step_that_nothing_before_it_feeds(small: World) -> None:
    plan = small.plan("train", "judge", inputs={"rows": "rows"})
    assert wiring(plan) == {"train": {"rows": "rows"}, "judge": {"rows": "rows"}}
    plan = small.plan("make", "train", inputs={"rows": "rows"})
    assert wiring(plan) == {"make": {}, "train": {"rows": "rows"}}, "the only step that has it, though another feeds it"


def test_artifacts_of_a_port_of_many_are_for_the_one_step_that_has_it_or_the_one_that_is_named(small: World) -> None:
    plan = small.plan("compare", inputs={"models.a": "hf", "compare.models.b": "judge", "models.c.d": "hf"})
    assert wiring(plan) == {"compare": {"models.a": "hf", "models.c.d": "hf", "models.b": "judge"}} or set(
        wiring(plan)["compare"]
    ) == {"models.a", "models.b", "models.c.d"}
    stages = ({"name": "one", "step": "compare"}, {"name": "two", "step": "compare"})
    plan = small.plan_pipeline(pipeline(*stages), {"one.models.a": "hf", "compare.models.b": "judge"})
    assert wiring(plan) == {
        "one": {"models.a": "hf", "models.b": "judge"},
        "two": {"models.b": "judge"},
    }
