"""Each stage of the recipes' pipelines compiles, on any machine, to the values that are published for it."""

import itertools

import pytest

from nemotron_steps.session.run_request import RunRequest
from nemotron_steps.session.session import Session
from tests.published.test_values import EVERYWHERE, STAGES, ours, theirs

PIPELINES = {
    "super3_rl": {
        "rlvr1": "super3_rlvr",
        "rlvr2": "super3_rlvr",
        "rlvr3": "super3_rlvr",
        "swe1": "super3_swe1",
        "swe2": "super3_swe2",
        "rlhf": "super3_rlhf",
    },
    "nano3_rl": {"rlvr": "nano3_rl"},
}
"""Pipeline → stage → the published config that it compiles to."""


@pytest.fixture(scope="module")
def plans(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RL_REWARD_MODEL", "GENRM_URL", "JUDGE_URL", "SAFETY_URL", "SWE_AGENT_URL"):
            patch.delenv(name, raising=False)
        bench = Session(home=str(tmp_path_factory.mktemp("home")))
        return {name: bench.plan(RunRequest((name,)), allow_unfilled=True) for name in PIPELINES}


@pytest.mark.parametrize(("pipeline", "stage"), [(p, stage) for p, stages in PIPELINES.items() for stage in stages])
def test_a_stage_compiles_to_the_published_values(pipeline, stage, plans):
    table = PIPELINES[pipeline][stage]
    reasons = STAGES[table][2]
    composed = ours(plans[pipeline].step(stage))
    different = {key for key, value in theirs(table).items() if composed(key) != value}
    assert different <= EVERYWHERE.keys() | reasons.keys()
    assert reasons.keys() <= different


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_checkpoints_go_from_stage_to_stage_and_all_to_the_evaluation(pipeline, plans):
    plan = plans[pipeline]
    trained = [key for key in plan.goals if "policy" in plan.step(key).config]
    for before, after in itertools.pairwise(trained):
        assert plan.step(after).inputs["policy"].step_key == before
    graded = [port.removeprefix("models.") for port in plan.step("eval").inputs if port.startswith("models.")]
    assert graded == trained
