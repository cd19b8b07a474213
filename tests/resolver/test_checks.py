"""Batch-size and GPU arithmetic, on the recipes' own numbers."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemotron_steps.manifest.models import StepManifest, StepTable
from nemotron_steps.resolver.checks import CHECKS, CheckSubject
from nemotron_steps.resolver.request import StepConfig

MANIFEST = StepManifest(step=StepTable(id="rl"))


def config(**changes: Any) -> dict[str, Any]:
    """RLHF of Super3 without its environment nodes: 64 nodes of 8, half of them for generation."""
    values: dict[str, Any] = {
        "grpo": {"num_prompts_per_step": 128, "num_generations_per_prompt": 16},
        "loss_fn": {"force_on_policy_ratio": True},
        "policy": {
            "train_global_batch_size": 2048,
            "megatron_cfg": {
                "enabled": True,
                "tensor_model_parallel_size": 4,
                "pipeline_model_parallel_size": 1,
                "context_parallel_size": 4,
                "expert_model_parallel_size": 8,
            },
            "generation": {
                "backend": "vllm",
                "vllm_cfg": {"tensor_parallel_size": 4},
                "colocated": {"enabled": False, "generation_devices": 256},
            },
        },
        "cluster": {"num_nodes": 64, "gpus_per_node": 8},
    }
    for dotted, value in changes.items():
        node = values
        *parents, last = dotted.split("__")
        for part in parents:
            node = node.setdefault(part, {})
        node[last] = value
    return values


def found(values: dict[str, Any], profile: dict[str, Any] | None = None) -> list[tuple[str, str, tuple[str, ...]]]:
    subject = CheckSubject("rl", MANIFEST, StepConfig(values), profile or {})
    return [(p.code, str(p.found), p.hints) for check in CHECKS for p in check(subject)]


def test_the_recipe_passes() -> None:
    assert found(config()) == []


def test_a_config_without_any_of_the_keys_passes() -> None:
    assert found({}) == []
    assert found({"cluster": {"gpus_per_node": 8}}) == []


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"policy__train_global_batch_size": 1024},
            ("E309", "1024", ("policy.train_global_batch_size=2048", "loss_fn.force_on_policy_ratio=false")),
        ),
        (
            {"policy__train_global_batch_size": 1536, "loss_fn__force_on_policy_ratio": False},
            ("E309", "1536", ("policy.train_global_batch_size=2048",)),
        ),
        (
            {"cluster__num_nodes": 63},
            ("E310", "248 training GPUs", ("cluster.num_nodes=64",)),
        ),
        (
            {"policy__generation__vllm_cfg__tensor_parallel_size": 512},
            ("E310", "512", ("policy.generation.vllm_cfg.tensor_parallel_size=8",)),
        ),
        (
            {"policy__generation__vllm_cfg__tensor_parallel_size": 6},
            ("E310", "6", ("policy.generation.vllm_cfg.tensor_parallel_size=2",)),
        ),
        (
            {"policy__generation__colocated__generation_devices": 512},
            ("E310", "512 of 512", ("policy.generation.colocated.generation_devices=256",)),
        ),
        (
            {"policy__megatron_cfg__expert_model_parallel_size": 7},
            ("E310", "7", ()),
        ),
        (
            {"policy__megatron_cfg__context_parallel_size": 16, "policy__train_global_batch_size": 2048 + 2},
            ("E309", "2050", ("policy.train_global_batch_size=2048", "loss_fn.force_on_policy_ratio=false")),
        ),
    ],
)
def test_each_rule(changes: dict[str, Any], expected: tuple[str, str, tuple[str, ...]]) -> None:
    assert expected in found(config(**changes))


def test_several_updates_a_step_are_fine_off_policy() -> None:
    assert found(config(policy__train_global_batch_size=512, loss_fn__force_on_policy_ratio=False)) == []


def test_a_batch_must_split_over_the_ranks() -> None:
    values = config(grpo__num_prompts_per_step=125, grpo__num_generations_per_prompt=8)
    values["policy"]["train_global_batch_size"] = 1000
    assert found(values) == [("E309", "1000", ("policy.train_global_batch_size=992",))]


def test_colocated_generation_uses_every_gpu() -> None:
    assert found(config(policy__generation__colocated__enabled=True, cluster__num_nodes=2)) == []


def test_cpu_has_no_gpu_arithmetic_but_ranks() -> None:
    values = config(cluster__gpus_per_node=0, cluster__policy_workers=3)
    values["policy"]["megatron_cfg"] = {"enabled": True}
    assert found(values) == [("E309", "2048", ("policy.train_global_batch_size=2049",))]
    values["cluster"]["policy_workers"] = 2
    assert found(values) == []


def test_ranks_on_cpu_hold_whole_copies_of_the_model() -> None:
    values: dict[str, Any] = {  # an SFT step: no rollouts, no generation
        "policy": {"train_global_batch_size": 64, "megatron_cfg": {"enabled": True, "tensor_model_parallel_size": 2}},
        "cluster": {"backend": "ray", "policy_workers": 3},
    }
    assert found(values) == [("E310", "3 ranks on CPU", ("cluster.policy_workers=4",))]
    values["cluster"]["policy_workers"] = 4
    assert found(values) == []
    del values["cluster"]["policy_workers"]
    assert found(values) == [("E310", "1 rank on CPU", ("cluster.policy_workers=2",))]


def test_sft_uses_every_gpu() -> None:
    values: dict[str, Any] = {
        "policy": {"train_global_batch_size": 64, "megatron_cfg": {"enabled": True, "tensor_model_parallel_size": 2}},
        "cluster": {"backend": "ray", "num_nodes": 2, "gpus_per_node": 8},
    }
    assert found(values) == []
    values["policy"]["train_global_batch_size"] = 60
    assert found(values) == [("E309", "60", ("policy.train_global_batch_size=64",))]


def test_a_layout_that_no_number_of_nodes_fits_has_no_such_hint() -> None:
    values = config(policy__generation__colocated__generation_devices=5)
    values["policy"]["generation"]["vllm_cfg"] = {"tensor_parallel_size": 1}
    assert [(code, hints) for code, _, hints in found(values) if code == "E310"] == [("E310", ())]


def test_separate_generation_without_a_number_is_one_generator() -> None:
    values = config(policy__generation__colocated__generation_devices=None, cluster__num_nodes=65)
    values["policy"]["megatron_cfg"] = {"enabled": True, "tensor_model_parallel_size": 4}
    values["policy"]["train_global_batch_size"] = values["grpo"]["num_prompts_per_step"] = 129 * 16
    values["loss_fn"]["force_on_policy_ratio"] = False
    assert [problem for problem in found(values) if problem[0] == "E310"] == []


def test_the_profile_bounds_the_cluster() -> None:
    assert found(config(), {"nodes": 64, "gpus_per_node": 8}) == []
    assert found(config(), {"nodes": 32, "gpus_per_node": 8}) == [
        ("E310", "64", ("cluster.num_nodes=32", "set nodes = 64 in the profile of env.toml"))
    ]


SIZES = st.sampled_from([1, 2, 3, 4, 8])


@given(SIZES, SIZES, SIZES, st.integers(1, 6), SIZES)
def test_a_layout_passes_exactly_when_it_divides(tp: int, pp: int, cp: int, nodes: int, per_node: int) -> None:
    values = {
        "policy": {
            "megatron_cfg": {
                "enabled": True,
                "tensor_model_parallel_size": tp,
                "pipeline_model_parallel_size": pp,
                "context_parallel_size": cp,
            }
        },
        "cluster": {"num_nodes": nodes, "gpus_per_node": per_node},
    }
    problems = found(values)
    assert (not problems) == ((nodes * per_node) % (tp * pp * cp) == 0)
    for _, _, hints in problems:
        for hint in hints:
            fixed = int(hint.partition("=")[2])
            assert (fixed * per_node) % (tp * pp * cp) == 0 and fixed >= nodes
