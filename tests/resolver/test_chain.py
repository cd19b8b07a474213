"""Which output of a list of steps a port is connected to."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemotron_steps.manifest.models import Consumes
from nemotron_steps.resolver.plan import StepOutput, SuppliedInput
from nemotron_steps.resolver.sources import Chain, Produced
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
