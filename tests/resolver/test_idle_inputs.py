"""A step takes no weights of a judge that somebody else serves: its input is there unless the config says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemotron_steps.errors import PlanError
from tests.resolver.worlds import World, types_of, wiring, world_of

RLHF = """
[[consumes]]
name = "judge"
type = "hf"
bind = "judge.model"
unless = { "judge.backend" = "http" }
[[produces]]
name = "model"
type = "mega"
"""


@pytest.fixture
def judged(tmp_path: Path, world: World) -> World:
    steps = {"judge": "-> model:hf", "rlhf": RLHF}
    of_judge = {"judge": {"step": "judge"}}
    return world_of(
        tmp_path,
        types_of(mega="", hf=""),
        steps,
        configs={
            ("judge", None): {},
            ("rlhf", None): {"judge": {"backend": "embedded", "model": None}, "inputs": of_judge},
            ("rlhf", "served"): {"judge": {"backend": "http", "model": "org/name"}, "inputs": of_judge},
        },
    )


def test_a_served_judge_needs_no_weights_and_keeps_its_name(judged: World) -> None:
    assert wiring(judged.plan("rlhf"))["rlhf"] == {"judge": "judge.model"}
    plan = judged.plan("rlhf", config="served")
    assert [step.key for step in plan.steps] == ["rlhf"] and plan.step("rlhf").inputs == {}


def test_weights_of_a_served_judge_are_refused_where_they_are_given(judged: World) -> None:
    with pytest.raises(PlanError) as caught:
        judged.plan("rlhf", config="served", inputs={"judge": "weights"})
    (problem,) = caught.value.problems
    assert problem.what == "rlhf takes no 'judge' while judge.backend is http"
    assert problem.where == "--input judge=weights" and problem.found == "judge.backend=http"
