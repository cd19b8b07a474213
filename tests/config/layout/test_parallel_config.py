"""Ranks, copies and generators that sizes make."""

from typing import Any

import pytest

from nemotron_steps.config.layout.parallel_config import JudgeLayout, ParallelConfig, TeacherLayout

APART = {"samples": True, "colocated": False}


@pytest.mark.parametrize(
    ("sizes", "gpus", "ranks", "separate", "generating", "copies"),
    [
        ({}, 0, 1, 0, 0, 1),
        ({"workers": 4, "samples": True}, 0, 4, 0, 1, 4),
        ({"workers": 4, "samples": True, "uses_vllm": True, "generator_width": 2}, 0, 4, 0, 2, 4),
        ({"workers": 4, **APART, "generation_devices": 3}, 0, 4, 3, 3, 4),
        ({"gpus_per_node": 8, "samples": True}, 8, 8, 0, 8, 8),
        ({"gpus_per_node": 8, **APART, "generator_width": 2}, 8, 6, 2, 2, 6),
        ({"gpus_per_node": 8, **APART, "generation_devices": 4, "generator_width": 2}, 8, 4, 4, 4, 4),
        ({"gpus_per_node": 8, "nodes": 3, "judge_nodes": 1, "tensor": 2, "pipeline": 2, "context": 2}, 16, 16, 0, 0, 2),
        ({"gpus_per_node": 8, "tensor": 3}, 8, 8, 0, 0, None),
        ({"gpus_per_node": 8, "nodes": 2, "teachers": (TeacherLayout("a"),)}, 8, 8, 0, 0, 8),
    ],
    ids=str,
)
def test_devices_that_train_and_generate(
    sizes: dict[str, Any], gpus: int, ranks: int, separate: int, generating: int, copies: int | None
) -> None:
    found = ParallelConfig(**sizes)
    assert (found.gpus, found.ranks, found.separate, found.generating) == (gpus, ranks, separate, generating)
    assert found.data_parallel == copies


@pytest.mark.parametrize(
    ("said", "sizes"),
    [
        ({"model": "m", "backend": "vllm", "tensor_parallel_size": 2, "replicas": 3}, (2, 3)),
        ({"model": "m", "backend": "embedded"}, (1, None)),
        ({"model": "m", "backend": "http"}, None),
    ],
)
def test_judges_that_are_loaded_here_take_room(said: dict[str, Any], sizes: tuple[int, int | None] | None) -> None:
    section = "env.nemo_gym.judge_model.responses_api_models.vllm_model"
    found = ParallelConfig.read({f"{section}.{key}": value for key, value in said.items()}.get).judges
    assert found == (() if sizes is None else (JudgeLayout("judge_model", *sizes, backend=said["backend"]),))
    assert all(judge.section == section for judge in found)
