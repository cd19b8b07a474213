"""Ranks, copies and generators that sizes make."""

from __future__ import annotations

from typing import Any

import pytest

from nemotron_steps.config.layout.parallel_config import JudgeLayout, ParallelConfig, TeacherLayout, key_of

APART = {"samples": True, "colocated": False}


@pytest.mark.parametrize(
    ("sizes", "gpus", "ranks", "separate", "generating", "copies"),
    [
        ({}, 0, 1, 0, 0, 1),
        ({"workers": 4, "tensor": 2}, 0, 4, 0, 0, 2),
        ({"workers": 4, "samples": True}, 0, 4, 0, 1, 4),
        ({"workers": 4, "samples": True, "uses_vllm": True, "generator_width": 2}, 0, 4, 0, 2, 4),
        ({"workers": 4, **APART, "generation_devices": 3}, 0, 4, 3, 3, 4),
        ({"gpus_per_node": 8, "nodes": 2}, 16, 16, 0, 0, 16),
        ({"gpus_per_node": 8, "samples": True}, 8, 8, 0, 8, 8),
        ({"gpus_per_node": 8, "colocated": False}, 8, 8, 0, 0, 8),
        ({"gpus_per_node": 8, **APART}, 8, 7, 1, 1, 7),
        ({"gpus_per_node": 8, **APART, "generator_width": 2}, 8, 6, 2, 2, 6),
        ({"gpus_per_node": 8, **APART, "generation_devices": 4, "generator_width": 2}, 8, 4, 4, 4, 4),
        ({"gpus_per_node": 8, **APART, "generation_devices": 8}, 8, 0, 8, 8, None),
        ({"gpus_per_node": 8, "nodes": 3, "judge_nodes": 1, "tensor": 2, "pipeline": 2, "context": 2}, 16, 16, 0, 0, 2),
        ({"gpus_per_node": 8, "nodes": 1, "judge_nodes": 2}, -8, -8, 0, 0, None),
        ({"gpus_per_node": 8, "tensor": 3}, 8, 8, 0, 0, None),
        ({"gpus_per_node": 8, "expert": 3}, 8, 8, 0, 0, 8),
        ({"gpus_per_node": 8, "nodes": 2, "teachers": (TeacherLayout("a"),)}, 8, 8, 0, 0, 8),
        ({"workers": 2, "teachers": (TeacherLayout("a", tensor=2),)}, 0, 2, 0, 0, 2),
    ],
    ids=str,
)
def test_devices_that_train_and_generate(
    sizes: dict[str, Any], gpus: int, ranks: int, separate: int, generating: int, copies: int | None
) -> None:
    found = ParallelConfig(**sizes)
    assert (found.gpus, found.ranks, found.separate, found.generating) == (gpus, ranks, separate, generating)
    assert found.data_parallel == copies


def test_under_the_dtensor_policy_its_own_size_counts_and_none_that_it_has_not() -> None:
    megatron, dtensor = "policy.megatron_cfg", "policy.dtensor_cfg"
    values: dict[str, Any] = {
        f"{megatron}.{name}": 2
        for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size",
                     "expert_model_parallel_size", "mtp_num_layers")
    }  # fmt: skip
    values |= {f"{megatron}.sequence_parallel": True, f"{megatron}.moe_router_bias_update_rate": 1}
    values |= {f"{dtensor}.tensor_parallel_size": 4}
    found = ParallelConfig.read(values.get)
    assert (found.tensor, found.pipeline, found.context, found.expert, found.mtp_layers) == (2, 2, 2, 2, 2)
    assert (found.sequence_parallel, found.router_bias_update_rate) == (True, 1.0)
    assert ParallelConfig.read({**values, f"{dtensor}.enabled": True}.get) == ParallelConfig(dtensor=True, tensor=4)
    assert key_of("nodes", True) == key_of("nodes", False) == "cluster.num_nodes"
    assert [key_of("tensor", on) for on in (False, True)] == [
        f"{megatron}.tensor_model_parallel_size", f"{dtensor}.tensor_parallel_size"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("backend", "read"),
    [
        ("vllm", (True, True, 4, 2)),
        ("embedded", (True, False, 1, 1)),
        (3, (False, False, 1, 1)),
    ],
)
def test_only_vllms_generators_spread(backend: Any, read: tuple[bool, bool, int, int]) -> None:
    key = "policy.generation"
    values = {
        f"{key}.backend": backend,
        f"{key}.vllm_cfg.tensor_parallel_size": 4,
        f"{key}.vllm_cfg.expert_parallel_size": 2,
    }
    found = ParallelConfig.read(values.get)
    assert (found.samples, found.uses_vllm, found.generator_width, found.generator_experts) == read


@pytest.mark.parametrize(
    ("said", "sizes"),
    [
        ({"model": "m", "backend": "vllm", "tensor_parallel_size": 2, "replicas": 3}, (2, 3)),
        ({"model": "m", "backend": "embedded"}, (1, None)),
        ({"model": "m", "backend": "embedded", "tensor_parallel_size": "2", "replicas": True}, (1, None)),
        ({"model": "m", "backend": "http"}, None),
        ({"model": "m"}, None),
        ({"backend": "vllm"}, None),
    ],
)
def test_judges_that_are_loaded_here_take_room(said: dict[str, Any], sizes: tuple[int, int | None] | None) -> None:
    section = "env.nemo_gym.judge_model.responses_api_models.vllm_model"
    found = ParallelConfig.read({f"{section}.{key}": value for key, value in said.items()}.get).judges
    assert found == (() if sizes is None else (JudgeLayout("judge_model", *sizes, backend=said["backend"]),))
    assert all(judge.section == section for judge in found)
