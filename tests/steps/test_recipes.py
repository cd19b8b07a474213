"""The public recipes' stages are planned without a problem and fit their GPUs. Their values: tests/published."""

import json
from pathlib import Path

import pytest

from nemotron_steps.config.schema.rl import JUDGE_ROLES, RlConfig
from nemotron_steps.engine.placement.on_ray import DevicePlan
from nemotron_steps.manifest.packs import builtin_pack_root
from nemotron_steps.session.run_request import RunRequest
from nemotron_steps.session.session import Session

CONFIGS = sorted(
    (file.parent.name, file.stem)
    for step in ("rlvr", "swe", "rlhf")
    for file in Path(builtin_pack_root(), "configs", "rl", "nemo_rl", step).glob("*.yaml")
    if not file.stem.startswith("tiny")
)


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RL_REWARD_MODEL", "GENRM_URL", "JUDGE_URL", "SAFETY_URL"):
            patch.delenv(name, raising=False)
        yield Session(home=str(tmp_path_factory.mktemp("home")))


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    prompts = tmp_path_factory.mktemp("prompts")
    agent = {"type": "responses_api_agents", "name": "mcqa_simple_agent"}
    row = {"responses_create_params": {"input": "A or B?"}, "expected_answer": "A", "agent_ref": agent}
    (prompts / "train.jsonl").write_text(json.dumps(row) + "\n")
    return {"prompts": str(prompts), "policy": "nvidia/policy"}


@pytest.mark.parametrize(("step", "config"), CONFIGS)
def test_a_stage_is_planned_without_a_problem_and_fits_its_gpus(step, config, bench, inputs):
    planned = bench.plan(RunRequest(targets=(f"rl/nemo_rl/{step}",), config=config, inputs=inputs))
    rl = RlConfig.model_validate(next(s for s in planned if s.step_id.endswith(step)).config)
    judges = {role: judge for role in JUDGE_ROLES if (judge := rl.env.nemo_gym.judge(role)) and judge.backend == "vllm"}
    plan = DevicePlan.of(rl, judges)
    assert sum(plan.judge_devices) <= rl.env.nemo_gym.num_gpu_nodes * rl.cluster.gpus_per_node
    if rl.grpo.async_grpo.enabled:
        # Longer than a rollout of the longest length takes at 20 tokens a second.
        longest = rl.policy.generation.max_new_tokens / 20
        assert rl.grpo.async_grpo.straggler_deadline_s >= min(longest, 7200)
