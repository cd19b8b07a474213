"""What memory depends on, read from a config: whatever it leaves out is as its schema says."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from nemotron_steps.config.layout.memory.settings import MemorySettings
from nemotron_steps.config.layout.parallel_config import JUDGE_ROLES, ParallelConfig, getter
from nemotron_steps.config.schema.base import Section
from nemotron_steps.config.schema.dpo import DpoConfig
from nemotron_steps.config.schema.opd import OpdConfig
from nemotron_steps.config.schema.rl import RlConfig
from nemotron_steps.config.schema.sft import SftConfig
from tests.config.layout.memory.shapes import flat


@pytest.mark.parametrize(
    ("schema", "own"), [(RlConfig, {}), (OpdConfig, {"topk": 64}), (DpoConfig, {"dpo": 0.05}), (SftConfig, {})]
)
def test_what_a_config_leaves_out_counts_as_its_schema_says(schema: type[Section], own: dict[str, Any]) -> None:
    nothing, filled = MemorySettings.read({}.get), MemorySettings.read(getter(schema()))
    assert nothing == MemorySettings(ParallelConfig()) and nothing.sizes == ParallelConfig.read({}.get)
    assert replace(filled, sizes=nothing.sizes) == replace(nothing, **own)
    stated = {each.name: getattr(nothing.sizes, each.name) for each in fields(ParallelConfig)}
    known = {name: value for name, value in stated.items() if value is not None and name != "samples"}
    assert {name: getattr(filled.sizes, name) for name in known} == known
    assert filled.sizes.samples is issubclass(schema, RlConfig)


@pytest.mark.parametrize("role", JUDGE_ROLES)
def test_what_a_judge_leaves_out_counts_as_its_schema_says(role: str) -> None:
    given = {"model": "judge", "backend": "vllm"}
    values = {"env": {"nemo_gym": {role: {"responses_api_models": {"vllm_model": given}}}}}
    (sparse,) = MemorySettings.read(flat(values).get).judges
    (filled,) = MemorySettings.read(getter(RlConfig.model_validate(values))).judges
    assert sparse == filled and (filled.role, filled.vllm, filled.tensor) == (role, True, 1)


def test_every_setting_is_read_from_its_own_key() -> None:
    values = {
        "policy": {
            "precision": "float32",
            "train_micro_batch_size": 2,
            "logprob_batch_size": 3,
            "logprob_chunk_size": 7,
            "sequence_packing": {"enabled": True, "train_mb_tokens": 5001, "logprob_mb_tokens": 5002},
            "dynamic_batching": {"train_mb_tokens": 5003, "logprob_mb_tokens": 5004},
            "megatron_cfg": {
                "activation_checkpointing": True,
                "freeze_moe_router": True,
                "peft": {"dim": 5, "target_modules": ["linear_qkv"], "exclude_modules": ["linear_fc1"]},
                "optimizer": {
                    "use_distributed_optimizer": True,
                    "exp_avg_dtype": "bfloat16",
                    "optimizer_cpu_offload": True,
                    "optimizer_offload_fraction": 0.5,
                },
            },
            "dtensor_cfg": {"cpu_offload": True, "lora_cfg": {"dim": 6}},
            "generation": {
                "max_new_tokens": 99,
                "max_sequences": 11,
                "vllm_cfg": {"gpu_memory_utilization": 0.3, "max_num_seqs": 12, "async_engine": False},
            },
        },
        "grpo": {"async_grpo": {"enabled": True}, "adv_estimator": {"name": "opd"}},
        "loss_fn": {"reference_policy_kl_penalty": 0.1, "zero_outside_topk": True},
        "on_policy_distillation": {"topk_logits_k": 64, "offload": False, "teachers": {"a": "x", "b": "y"}},
        "cluster": {"gpu_memory_gib": 141},
    }
    found = MemorySettings.read(flat(values).get)
    assert found == MemorySettings(
        found.sizes, gpu_memory_gib=141.0, precision="float32", micro_batch=2, logprob_batch=3, chunk=7, packs=True,
        packed_tokens=5001, packed_logprob_tokens=5002, balanced_tokens=5003, balanced_logprob_tokens=5004,
        checkpoints=True, cpu_offload=True, freezes_router=True, adapter_dim=5, adapter_targets=("linear_qkv",),
        adapter_excluded=("linear_fc1",), lora_dim=6, distributed=True, exp_avg="bfloat16", offloads=True,
        offload_fraction=0.5, max_new_tokens=99, max_sequences=11, utilization=0.3, max_num_seqs=12, own_process=False,
        asynchronous=True, kl_penalty=0.1, estimator="opd", topk=64, zero_outside=True, offloads_teachers=False,
        teachers=("a", "b"),
    )  # fmt: skip
    others = {
        "policy": {
            "dynamic_batching": {"enabled": True},
            "megatron_cfg": {
                "mtp_detach_heads": True,
                "peft": {"enabled": True},
                "optimizer": {"use_precision_aware_optimizer": True, "exp_avg_sq_dtype": "bfloat16"},
            },
            "dtensor_cfg": {"activation_checkpointing": True, "lora_cfg": {"enabled": True}},
        },
        "dpo": {"reference_policy_kl_penalty": 0.2},
    }
    found = MemorySettings.read(flat(others).get)
    assert found == MemorySettings(
        found.sizes, balances=True, detaches_mtp=True, adapts=True, precision_aware=True, exp_avg_sq="bfloat16",
        dtensor_checkpoints=True, lora=True, dpo=0.2,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("values", "budget", "logprob_budget"),
    [
        ({}, None, None),
        ({"packed_tokens": 9, "balanced_tokens": 9}, None, None),
        ({"packs": True}, 4 * 4096, 3 * 4096),
        ({"packs": True, "packed_tokens": 5, "packed_logprob_tokens": 6, "balanced_tokens": 7}, 5, 6),
        ({"balances": True, "balanced_tokens": 5, "balanced_logprob_tokens": 6, "packed_tokens": 7}, 5, 6),
        ({"balances": True, "packed_tokens": 7}, 4 * 4096, 3 * 4096),
        ({"packs": True, "dpo": 0.1}, 8 * 4096, 6 * 4096),
    ],
)
def test_a_budget_is_that_of_the_batching_that_is_on(
    values: dict[str, Any], budget: int | None, logprob_budget: int | None
) -> None:
    settings = MemorySettings(ParallelConfig(), logprob_batch=3, **values)
    assert (settings.budget(), settings.budget(logprobs=True)) == (budget, logprob_budget)


@pytest.mark.parametrize(
    ("values", "has_reference", "compares"),
    [({}, False, False), ({"kl_penalty": 0.1}, True, False), ({"dpo": 0.0}, True, False),
     ({"teachers": ("a",)}, False, True), ({"teachers": ("a",), "estimator": "opd"}, False, False)],
)  # fmt: skip
def test_what_is_computed_beside_the_policy(values: dict[str, Any], has_reference: bool, compares: bool) -> None:
    settings = MemorySettings(ParallelConfig(), **values)
    assert (settings.has_reference, settings.compares) == (has_reference, compares)


@pytest.mark.parametrize(("length", "end", "longest"), [(None, None, 4096), (8, None, 8), (8, 16, 16), (16, 8, 16)])
def test_the_longest_sequence_is_that_of_the_whole_run(length: int | None, end: int | None, longest: int) -> None:
    assert MemorySettings(ParallelConfig(length=length, length_end=end)).longest == longest
