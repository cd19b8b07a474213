"""The built-in steps and pipelines keep to what those of other packages are held to.

Of the steps, what their manifests and configs say; their tiny runs have tests of their own.
"""

from pathlib import Path

import pytest

from nemotron_steps.manifest.registry import load_registry
from nemotron_steps.testing import pipeline_conformance, step_manifest
from nemotron_steps.testing.step_subject import StepSubject
from nemotron_steps.testing.suite import Examination, State

TestNano3 = pipeline_conformance("nano3_rl")
TestSuper3 = pipeline_conformance("super3_rl")
TestSuper3Data = pipeline_conformance("super3_data_prep")
TestDistillation = pipeline_conformance("opd")

ONLY_WITH_ANOTHER_KEY = {
    "rl/nemo_rl/opd": "grpo.adv_estimator.name=opd",  # without on_policy_distillation.topk_logits_k
    "rl/nemo_rl/rlhf": "env.should_use_nemo_gym=False",  # with env.environment
    "rl/nemo_rl/rlvr": "env.should_use_nemo_gym=False",
}
"""Step → a choice that the config refuses alone, saying what it goes with."""
CHECKS = [name for name in step_manifest.SUITE.checks if name != "importing_it_is_light"]
"""All but one in a process of its own: what built-in modules import is test_layers' matter."""


@pytest.mark.parametrize("step_id", sorted(load_registry().steps))
def test_a_built_in_step_keeps_to_the_rules(tmp_path: Path, step_id: str):
    outcomes = Examination(step_manifest.SUITE, StepSubject(step_id, tmp_path)).outcomes(CHECKS)
    failed = {check: outcome.text for check, outcome in outcomes.items() if outcome.state is State.FAILED}
    if step_id in ONLY_WITH_ANOTHER_KEY:
        assert ONLY_WITH_ANOTHER_KEY[step_id] in failed.pop("choices_are_accepted")
    assert failed == {}
