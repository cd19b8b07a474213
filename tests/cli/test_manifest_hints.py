"""Whatever the built-in manifests advise can be pasted behind a command, and changes what it runs."""

from __future__ import annotations

import shlex

import pytest

from nemotron_steps.cli.parser import build, request_of
from nemotron_steps.manifest.packs import PackSearch, builtin_pack_root, open_pack
from nemotron_steps.manifest.registry import load_registry
from nemotron_steps.session.session import Session

STEPS = load_registry(PackSearch((open_pack(builtin_pack_root(), "nemotron_steps", "built-in"),))).steps
SMALL = ("tiny", "one_gpu")
WHERE_IT_HAPPENS = {
    "Training uses answers of weights that are too old": ("grpo.async_grpo.enabled=true",),
    "Answers are sampled nearly at random": ("policy.generation.temperature=2",),
    "Filters leave nothing to train on": ("grpo.seq_logprob_error_threshold=1",),
    "The KL penalty outweighs the reward": ("loss_fn.reference_policy_kl_penalty=1",),
}
"""What a run has that can see the fault, beside its config."""
ADVICE = [
    pytest.param(step, config, advice, id=f"{step.id}-{config}-{getattr(advice, 'name', None) or advice.when}")
    for step in STEPS.values()
    for config in [name for name in SMALL if name in step.config_names] or ["default"]
    for advice in (*step.strategies, *step.errors)
    if advice.override
]


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    return Session(home=str(tmp_path_factory.mktemp("home")))


def config_of(bench, step, config, *overrides):
    arguments = build("steps").parse_args(["plan", step.id, *overrides, "-c", config])
    plan = bench.plan(request_of(arguments), allow_unfilled=True)
    (planned,) = [planned for planned in plan if planned.key == step.id]
    return planned.config


@pytest.mark.parametrize(("step", "config", "advice"), ADVICE)
def test_an_override_that_a_manifest_suggests_can_be_pasted_and_changes_the_run(step, config, advice, bench):
    given = WHERE_IT_HAPPENS.get(getattr(advice, "when", ""), ())
    before = config_of(bench, step, config, *given)
    printed = " ".join(advice.overrides_for(before))
    after = config_of(bench, step, config, *given, *shlex.split(printed))
    assert after != before, printed
