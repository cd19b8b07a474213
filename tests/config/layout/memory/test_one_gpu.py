"""The configs named one_gpu and one_node, with models as large as they say: every role's peak fits a GPU of 80 GB."""

from __future__ import annotations

import pytest

from nemotron_steps.config.layout.memory.devices import step_memory
from nemotron_steps.config.layout.memory.settings import MemorySettings
from nemotron_steps.config.layout.memory.shape import ModelShape
from nemotron_steps.session.session import Session
from tests.config.layout.memory.shapes import QWEN3_1_7B, QWEN3_8B, flat

SMALL, LARGE = ModelShape.read(QWEN3_1_7B), ModelShape.read(QWEN3_8B)
JUDGE = "env.nemo_gym.genrm_model.responses_api_models.vllm_model"
STEPS = ("rl/nemo_rl/rlvr", "rl/nemo_rl/rlhf", "rl/nemo_rl/swe", "rl/nemo_rl/dpo", "sft/megatron_bridge")


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    return Session(home=str(tmp_path_factory.mktemp("home")))


def values_of(bench, step, config, *overrides):
    return flat(bench.compose(step, config, overrides).values)


@pytest.mark.parametrize("step", STEPS)
def test_one_gpu_holds_a_model_of_1_7_b_and_a_judge_as_large(step, bench):
    """The judge of rlhf took 256 rows of 32,768 tokens, more than a terabyte."""
    settings = MemorySettings.read(values_of(bench, step, "one_gpu").get)
    memory = step_memory(settings, lambda role: SMALL)
    assert memory.devices and memory.shortages == []


@pytest.mark.parametrize("step", STEPS)
def test_one_node_holds_a_model_of_8_b_and_a_judge_of_1_7(step, bench):
    settings = MemorySettings.read(values_of(bench, step, "one_node").get)
    memory = step_memory(settings, lambda role: LARGE if role in ("policy", "reference") else SMALL)
    assert memory.devices and memory.shortages == []
