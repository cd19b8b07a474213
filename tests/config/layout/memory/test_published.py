"""Configs with models as large as they say: one_gpu and one_node on GPUs of 80 GB, and the published recipes' own
models on their own GPUs and on H100s: what does not fit there, and why."""

import pytest

from nemotron_steps.config.layout.memory.devices import step_memory
from nemotron_steps.config.layout.memory.settings import MemorySettings
from nemotron_steps.config.layout.memory.shape import ModelShape
from nemotron_steps.session.run_request import RunRequest
from nemotron_steps.session.session import Session
from tests.cli.test_model_plans import hub_folder
from tests.config.layout.memory.shapes import NANO_30B, QWEN3_1_7B, QWEN3_8B, SUPER_120B, flat

NANO, SUPER = ModelShape.read(NANO_30B), ModelShape.read(SUPER_120B)
FIT = {
    ("rlvr", "nano3"): NANO,
    ("rlvr", "nano3_genrm"): NANO,
    ("rlvr", "small"): SUPER,
    ("rlhf", "small"): SUPER,
}
WIDER = {
    ("rlvr", "rlvr1"): SUPER,
    ("rlhf", "super3"): SUPER,
    ("swe", "swe1"): SUPER,
    ("swe", "swe2"): SUPER,
}
"""Eight ranks hold the experts of Super: 14.4 B parameters each, of which gradients in float32 take 54 GiB."""


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    return Session(home=str(tmp_path_factory.mktemp("home")))


STEPS = ("rl/nemo_rl/rlvr", "rl/nemo_rl/rlhf", "rl/nemo_rl/swe", "rl/nemo_rl/dpo", "sft/megatron_bridge")


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(("config", "policy"), [("one_gpu", QWEN3_1_7B), ("one_node", QWEN3_8B)])
def test_one_gpu_and_one_node_hold_the_models_that_they_are_for_and_a_judge_of_1_7_b(step, config, policy, bench):
    """The judge of rlhf took 256 rows of 32,768 tokens, more than a terabyte."""
    settings = MemorySettings.read(flat(bench.compose(step, config, ()).values).get)
    policy, other = ModelShape.read(policy), ModelShape.read(QWEN3_1_7B)
    memory = step_memory(settings, lambda role: policy if role == "policy" else other)
    assert memory.devices and memory.shortages == []


def predicted(bench, step, config, shape, *overrides):
    values = bench.compose(f"rl/nemo_rl/{step}", config, overrides).values
    settings = MemorySettings.read(flat(values).get)
    return step_memory(settings, lambda role: shape if role == "policy" else None)


H100 = "cluster.gpu_memory_gib=80"


@pytest.mark.parametrize(("step", "config"), [*FIT, *WIDER, ("swe", "small")])
def test_a_published_config_plans_with_its_own_model_on_its_own_gpus(step, config, bench, tmp_path):
    """Nano's H100s, Super's B200s: with the widths of the real config.json, which twins do not have."""
    shape = {**FIT, **WIDER}.get((step, config), SUPER)
    sizes = NANO_30B if shape is NANO else SUPER_120B
    folder = hub_folder(tmp_path / "hub", **sizes, num_hidden_layers=len(sizes["hybrid_override_pattern"]))
    asked = RunRequest((f"rl/nemo_rl/{step}",), config=config, inputs={"policy": str(folder)})
    memory = bench.plan(asked).step(f"rl/nemo_rl/{step}").memory
    assert memory.devices and memory.shortages == []
    if (step, config) in FIT:
        assert predicted(bench, step, config, shape, H100).shortages == []


@pytest.mark.parametrize(("step", "config"), WIDER)
def test_super_needs_its_experts_over_sixteen_ranks(step, config, bench):
    shape = WIDER[step, config]
    assert predicted(bench, step, config, shape, H100).shortages
    assert predicted(bench, step, config, shape, "cluster.gpu_memory_gib=141").shortages == []
    wider = predicted(bench, step, config, shape, H100, "policy.megatron_cfg.expert_model_parallel_size=16")
    assert wider.shortages == []
