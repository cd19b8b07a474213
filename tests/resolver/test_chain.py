"""Which output of a list of steps a port is connected to."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemotron_steps.manifest.models import Consumes
from nemotron_steps.resolver.chain import Chain, Produced
from nemotron_steps.resolver.plan import StepOutput, SuppliedInput
from tests.resolver.worlds import World, problems, types_of, wiring, world_of

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
    return [f"{found.source.step_key}.{found.source.port}" for found in chain.candidates(port)]


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


def test_what_a_port_accepts_as_it_is_was_converted_on_purpose() -> None:
    chain = Chain(TYPES, converted_from={"up": (SuppliedInput("x", "hf"), "hf")})
    produced = Produced(StepOutput("up", "mega"), "mega")
    assert chain.look_through(produced, Consumes(type="model")) == (StepOutput("up", "mega"), "mega")
    assert chain.look_through(produced, Consumes(type="hf")) == (SuppliedInput("x", "hf"), "hf")


def test_a_model_before_is_no_judge_where_a_port_asks_for_one(world: World) -> None:
    found = problems(world, "sft_hf", "rlhf", inputs={"prompts": "prompts", "sft_hf.chats": "chats"})
    assert found == [("E303", "nothing feeds 'judge' of rlhf")]
    plan = world.plan("sft_hf", "rlhf", "rl", inputs={"prompts": "prompts", "judge": "hf", "sft_hf.chats": "chats"})
    assert wiring(plan)["rlhf"]["judge"] == "hf"


def test_a_bare_input_is_for_a_port_that_lists_do_not_connect(tmp_path: Path) -> None:
    alone = '[[consumes]]\nname = "start"\ntype = "hf"\nauto = false\n[[produces]]\ntype = "hf"\n'
    narrow = '[[consumes]]\nname = "judge"\ntype = "hf"\nauto = "judge"\n[[produces]]\ntype = "hf"\n'
    steps = {"hf": "-> hf", "a": alone, "b": alone, "c": narrow, "d": narrow, "judge": "-> judge"}
    world = world_of(tmp_path, TYPES, steps, artifacts={"x": SuppliedInput("x", "hf")})
    plan = world.plan("hf", "a", "b", inputs={"start": "x"})
    assert wiring(plan) == {"hf": {}, "a": {"start": "x"}, "b": {"start": "x"}}
    plan = world.plan("c", "judge", "d", inputs={"judge": "x"})
    assert wiring(plan) == {"c": {"judge": "x"}, "judge": {}, "d": {"judge": "judge.judge"}}
    plan = world.plan("hf", "c", "d", inputs={"judge": "x"})
    assert wiring(plan) == {"hf": {}, "c": {"judge": "x"}, "d": {"judge": "x"}}
