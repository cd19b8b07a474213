"""Which parts are on a GPU together, in which phase."""

from __future__ import annotations

from typing import Any

import pytest

from nemotron_steps.config.layout.memory.devices import (
    ALLOCATOR,
    CONTEXT,
    DEVICE,
    TEACHER,
    DeviceMemory,
    StepMemory,
    _overhead,
    step_memory,
)
from nemotron_steps.config.layout.memory.generation import GIB
from nemotron_steps.config.layout.memory.settings import MemorySettings
from nemotron_steps.config.layout.memory.shape import ModelShape
from tests.config.layout.memory.shapes import NANO_30B, QWEN3_8B, flat

SHAPE = ModelShape.read(QWEN3_8B)
JUDGE = "env.nemo_gym.genrm_model.responses_api_models.vllm_model"


def memory(shape: ModelShape | None = SHAPE, **changes: Any) -> StepMemory:
    """Of RLVR on a node of eight GPUs, synchronous; `__` in a name stands for a dot."""
    values: dict[str, Any] = {
        "grpo.num_prompts_per_step": 16,
        "grpo.num_generations_per_prompt": 4,
        "policy.train_global_batch_size": 64,
        "policy.max_total_sequence_length": 4096,
        "policy.megatron_cfg.activation_checkpointing": True,
        "policy.generation.backend": "vllm",
        "policy.generation.max_new_tokens": 2048,
        "policy.generation.vllm_cfg.gpu_memory_utilization": 0.4,
        "cluster.backend": "ray",
        "cluster.gpus_per_node": 8,
    }
    values.update({name.replace("__", "."): value for name, value in changes.items()})
    return step_memory(MemorySettings.read(values.get), lambda role: shape)


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


def test_parts_apart_have_gpus_of_their_own():
    apart = {"colocated.enabled": False, "colocated.generation_devices": 4}
    trains, generates = memory(**{f"policy.generation.{key}": value for key, value in apart.items()}).devices
    assert (trains.name, list(trains.phases)) == ("trains", ["train"])
    assert (generates.name, list(generates.phases)) == ("generates", ["generate"])
    assert roles(trains, "train") == {"policy"} and roles(generates, "generate") == {"generator"}


def test_a_judge_is_there_in_every_phase_and_on_its_own_nodes_alone():
    (device,) = judged().devices
    for phase in ("generate", "train"):
        lines = device.phases[phase]
        share = sum(count for (role, _), count in lines.items() if role == "genrm_model")
        assert share == pytest.approx(max(0.1 * 80 * GIB, SHAPE.parameters * 2), rel=1e-3)
    shared, alone = judged(cluster__num_nodes=2, env__nemo_gym__num_gpu_nodes=1).devices
    assert "genrm_model" not in roles(shared, "generate")
    assert alone.name == "judges" and roles(alone, "judge") == {"genrm_model"}


def test_moments_leave_a_gpu_and_stay_where_there_is_none():
    offloads = {"policy__megatron_cfg__optimizer__optimizer_cpu_offload": True}
    whole, on_gpu = memory(), memory(**offloads)
    assert on_gpu.host["optimizer"] == whole.devices[0].phases["train"]["policy", "optimizer"] * 2 // 3
    assert memory(cluster__gpus_per_node=0, policy__generation__backend="embedded", **offloads).host == {}


@pytest.mark.parametrize(("given", "read"), [(141, 141.0), (79.5, 79.5), (True, 80.0), ("80", 80.0)])
def test_a_gpus_memory_is_any_number(given, read):
    assert MemorySettings.read({"cluster.gpu_memory_gib": given}.get).gpu_memory_gib == read


def test_the_cache_of_vllm_has_room_for_what_its_weights_leave():
    assert SHAPE is not None
    left = int(0.4 * 80 * GIB) - 2 * SHAPE.parameters
    assert memory().cache_tokens == {"generator": left // SHAPE.kv_bytes_per_token}
    assert memory(policy__generation__backend="embedded").cache_tokens == {}


def test_a_judge_without_vllm_is_in_bfloat16_on_gpus_and_in_float32_elsewhere():
    assert SHAPE is not None
    embedded = {f"{JUDGE}.backend": "embedded"}
    (on_gpu,) = judged(**embedded).devices
    assert on_gpu.phases["train"]["genrm_model", "weights"] == 2 * SHAPE.parameters
    (on_cpu,) = judged(**embedded, cluster__gpus_per_node=0, policy__generation__backend="embedded").devices
    assert on_cpu.phases["train"]["genrm_model", "weights"] == 4 * SHAPE.parameters


def test_of_judges_on_generators_gpus_the_one_that_takes_most_is_counted():
    """As many generators as judges or more: each judge goes to GPUs of its own among them."""
    second = JUDGE.replace("genrm_model", "judge_model")
    both = {f"{JUDGE}.gpu_memory_utilization": 0.3, f"{second}.model": "other", f"{second}.backend": "vllm"}
    (device,) = judged(**both, **{f"{second}.gpu_memory_utilization": 0.4}).devices
    assert roles(device, "generate") == {"generator", "judge_model", "policy"}
    one = {"policy__generation__vllm_cfg__tensor_parallel_size": 8}
    (device,) = judged(**both, **{f"{second}.gpu_memory_utilization": 0.4}, **one).devices
    assert roles(device, "generate") == {"generator", "judge_model", "genrm_model", "policy"}


def test_a_judges_share_holds_a_conversation_as_long_as_it_takes_itself():
    """Whatever the length of the policy's."""

    def least(**changes: Any) -> int:
        return judged(**changes).generators["genrm_model"][1].least

    assert SHAPE is not None
    assert least(policy__max_total_sequence_length=16384) == least()
    longer = least(**{f"{JUDGE}.max_total_sequence_length": 65536})
    assert longer - least() == 32768 * SHAPE.kv_bytes_per_token


def test_a_reference_policy_takes_host_memory_and_a_phase_of_its_own():
    with_kl = memory(loss_fn__reference_policy_kl_penalty=0.01)
    (device,) = with_kl.devices
    assert with_kl.host["reference weights"] == device.phases["reference"]["policy", "reference weights"]
    assert ("policy", "reference weights") not in device.phases["train"]
    assert memory().host == {}


@pytest.mark.parametrize(("capacity", "fits"), [(90, True), (89, False)])
def test_what_the_allocator_holds_for_nothing_refuses_nothing(capacity, fits):
    lines = {("policy", "weights"): 90, (DEVICE, "allocator"): 20}
    assert DeviceMemory("trains", {"train": lines}, capacity).fits is fits


def test_what_is_not_known_is_named():
    without = memory(shape=None)
    assert without.unknown == ("policy",) and without.devices == () and without.batch.rollouts == 64


def of_policy(line: str, **changes: Any) -> int:
    (device,) = memory(**changes).devices
    return device.phases["train"]["policy", line]


@pytest.mark.parametrize(
    ("line", "changes", "least"),
    [
        ("weights", {"policy__megatron_cfg__tensor_model_parallel_size": 2}, 1.9),
        ("optimizer", {"policy__megatron_cfg__optimizer__use_distributed_optimizer": True}, 7.9),
        ("optimizer", {"policy__megatron_cfg__optimizer__use_precision_aware_optimizer": True}, 1.19),
        ("gradients", {"policy__megatron_cfg__pipeline_model_parallel_size": 2}, 1.7),
        ("activations", {"policy__megatron_cfg__context_parallel_size": 2}, 1.9),
        ("activations", {"policy__train_micro_batch_size": 1}, 2.0),
        ("logprobs", {"policy__logprob_chunk_size": 128}, 1.05),
    ],
)
def test_what_a_setting_saves(line, changes, least):
    assert of_policy(line) / of_policy(line, **changes) >= least


def test_activation_checkpointing_saves_most_of_the_activations():
    kept = of_policy("activations", policy__megatron_cfg__activation_checkpointing=False)
    assert kept > 5 * of_policy("activations")


def test_stages_ahead_hold_more_micro_batches():
    """One forward, one backward: the first of two stages has two in flight."""
    two = {"policy__megatron_cfg__pipeline_model_parallel_size": 2, "policy__train_micro_batch_size": 1}
    layers = 36
    (device,) = memory(policy__megatron_cfg__activation_checkpointing=False, **two).devices
    (whole,) = memory(policy__megatron_cfg__activation_checkpointing=False, policy__train_micro_batch_size=1).devices
    first, alone = (each.phases["train"]["policy", "activations"] for each in (device, whole))
    assert first == pytest.approx(alone, rel=0.05), f"half of {layers} layers, twice"


@pytest.mark.parametrize("recomputes", [True, False])
def test_of_pipeline_stages_the_one_that_takes_most_is_counted(recomputes):
    """The first has most activations, and the last alone has logprobs, which are more than a few of those."""
    changes = {"pipeline_model_parallel_size": 2, "activation_checkpointing": recomputes}
    (device,) = memory(**{f"policy__megatron_cfg__{key}": value for key, value in changes.items()}).devices
    assert (("policy", "logprobs") in device.phases["train"]) is recomputes


def test_no_more_micro_batches_are_in_flight_than_there_are():
    """A rank's sixteen rows in one micro-batch, or in two that are both in flight."""
    unlike = {
        "policy__megatron_cfg__pipeline_model_parallel_size": 2,
        "policy__megatron_cfg__activation_checkpointing": False,
    }
    one, two = (of_policy("activations", policy__train_micro_batch_size=rows, **unlike) for rows in (16, 8))
    assert one == pytest.approx(two, rel=0.1)


def test_experts_and_their_optimizer_follow_expert_parallelism():
    shape = ModelShape.read(NANO_30B)
    (spread,) = memory(shape=shape, policy__megatron_cfg__expert_model_parallel_size=8).devices
    (whole,) = memory(shape=shape).devices
    weights = [device.phases["train"]["policy", "weights"] for device in (whole, spread)]
    experts = 23 * 128 * 2 * 2688 * 1856 * 2
    assert weights[0] - weights[1] == pytest.approx(experts * 7 / 8, rel=1e-3)


def test_the_budget_of_tokens_bounds_a_micro_batch():
    packed = memory(policy__sequence_packing__enabled=True, policy__sequence_packing__train_mb_tokens=8192).batch
    assert (packed.tokens, packed.budget, packed.data_parallel, packed.rows) == (8192, True, 8, 8)
    counted = memory(policy__train_micro_batch_size=4).batch
    assert (counted.tokens, counted.micro_batches, counted.budget) == (2048 + 4 * 2048, 2, False)


def test_pairs_count_twice():
    values = {
        "dpo": {"reference_policy_kl_penalty": 0.1},
        "policy": {"train_global_batch_size": 16, "train_micro_batch_size": 2, "max_total_sequence_length": 1024},
        "cluster": {"gpus_per_node": 1},
    }
    found = step_memory(MemorySettings.read(flat(values).get), lambda role: SHAPE)
    assert (found.batch.micro_rows, found.batch.tokens, found.batch.rollouts) == (4, 4096, None)


@pytest.mark.parametrize(("backend", "processes"), [("ray", 2), ("process", 1)])
def test_roles_share_a_context_where_they_share_a_process(backend: str, processes: int) -> None:
    settings = MemorySettings.read({"cluster.backend": backend, "cluster.gpus_per_node": 1}.get)
    lines = {("policy", "weights"): 10**9, ("genrm_model", "weights"): 10**9, (TEACHER, "weights"): 10**9}
    found = _overhead(settings, None, None, [], lines)
    assert found == {(DEVICE, "context"): processes * CONTEXT, (DEVICE, "allocator"): int(ALLOCATOR * 3 * 10**9)}
