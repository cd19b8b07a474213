"""Which parts are on a GPU together, in which phase."""

from typing import Any

import pytest

from nemotron_steps.config.layout.memory.devices import StepMemory, step_memory
from nemotron_steps.config.layout.memory.generation import GIB
from nemotron_steps.config.layout.memory.settings import MemorySettings
from nemotron_steps.config.layout.memory.shape import ModelShape
from tests.config.layout.memory.shapes import QWEN3_8B, on_a_node

SHAPE = ModelShape.read(QWEN3_8B)
JUDGE = "env.nemo_gym.genrm_model.responses_api_models.vllm_model"


def memory(**changes: Any) -> StepMemory:
    values = {"grpo.num_prompts_per_step": 16, "grpo.num_generations_per_prompt": 4}
    return step_memory(MemorySettings.read(on_a_node(values, **changes).get), lambda role: SHAPE)


def judged(**changes: Any) -> StepMemory:
    judge = {"model": "judge", "backend": "vllm", "gpu_memory_utilization": 0.1}
    return memory(**{**{f"{JUDGE}.{key}": value for key, value in judge.items()}, **changes})


def roles(device, phase):
    return {role for role, _ in device.phases[phase]} - {"device"}


def test_colocated_parts_share_a_gpu_and_take_turns():
    (device,) = memory().devices
    assert device.name == "trains and generates" and list(device.phases) == ["generate", "train"]
    assert ("policy", "gradients") not in device.phases["generate"]
    assert ("generator", "cache") not in device.phases["train"]  # vLLM sleeps
    assert [phase for phase, lines in device.phases.items() if ("generator", "asleep") in lines] == ["train"]
    assert device.peak == max(device.total("generate"), device.total("train"))


def test_a_judge_is_there_in_every_phase_and_on_its_own_nodes_alone():
    (device,) = judged().devices
    for phase in ("generate", "train"):
        lines = device.phases[phase]
        share = sum(count for (role, _), count in lines.items() if role == "genrm_model")
        assert share == pytest.approx(max(0.1 * 80 * GIB, SHAPE.parameters * 2), rel=1e-3)
    shared, alone = judged(cluster__num_nodes=2, env__nemo_gym__num_gpu_nodes=1).devices
    assert "genrm_model" not in roles(shared, "generate")
    assert alone.name == "judges" and roles(alone, "judge") == {"genrm_model"}


def test_a_reference_policy_takes_host_memory_and_a_phase_of_its_own():
    with_kl = memory(loss_fn__reference_policy_kl_penalty=0.01)
    (device,) = with_kl.devices
    assert with_kl.host["reference weights"] == device.phases["reference"]["policy", "reference weights"]
    assert ("policy", "reference weights") not in device.phases["train"]
    assert memory().host == {}


def test_stages_ahead_hold_more_micro_batches():
    """One forward, one backward: the first of two stages has two in flight, each of half of the layers."""
    two = {"policy__megatron_cfg__pipeline_model_parallel_size": 2, "policy__train_micro_batch_size": 1}
    (device,) = memory(policy__megatron_cfg__activation_checkpointing=False, **two).devices
    (whole,) = memory(policy__megatron_cfg__activation_checkpointing=False, policy__train_micro_batch_size=1).devices
    first, alone = (each.phases["train"]["policy", "activations"] for each in (device, whole))
    assert first == pytest.approx(alone, rel=0.05)
