"""Overrides that mend a layout: the nearest, and such that nothing is left to refuse."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from nemotron_steps.config.layout.facts import ModelFacts
from nemotron_steps.config.layout.mends import _fewer, _near, mends, overrides, refuse
from nemotron_steps.config.layout.misfits import Misfit, misfits
from nemotron_steps.config.layout.sizes import LayoutSizes
from nemotron_steps.errors import ConfigError


@pytest.mark.parametrize(("batch", "mended"), [(1, 8), (3, 8), (11, 8), (13, 16), (30, 32)])
def test_a_batch_becomes_the_nearest_that_gives_every_rank_as_much(batch: int, mended: int) -> None:
    sizes = LayoutSizes(batch=batch, backend="ray", gpus_per_node=8)
    assert mends(sizes)[0] == f"policy.train_global_batch_size={mended}"


@pytest.mark.parametrize(
    ("length", "end", "mended"),
    [
        (8192, None, "policy.max_total_sequence_length=4096"),
        (8192, 16384, "policy.max_total_sequence_length=4096 policy.max_total_sequence_length_end=null"),
        (2048, 16384, "policy.max_total_sequence_length_end=4096"),
    ],
)
def test_sequences_end_where_the_models_positions_do(length: int, end: int | None, mended: str) -> None:
    model = ModelFacts("qwen3", layers=2, positions=4096)
    assert mends(LayoutSizes(length=length, length_end=end), model) == [mended]


@pytest.mark.parametrize(
    ("sizes", "model", "mended"),
    [
        ({"router_replay": True}, ModelFacts("qwen3"), "policy.router_replay.enabled=false"),
        (
            {"router_bias_update_rate": 0.1, "samples": True},
            ModelFacts("qwen3_moe", experts=8),
            "policy.megatron_cfg.moe_router_bias_update_rate=0",
        ),
        ({"model_type": "llama"}, ModelFacts("qwen3"), "policy.model_type=null"),
        ({"new_tokens": 600}, ModelFacts("qwen3", positions=512), "policy.generation.max_new_tokens=512"),
        (
            {"uses_vllm": True, "samples": True, "generator_width": 2},
            ModelFacts("nemotron_h", bounds_time_steps=True),
            "policy.generation.backend=embedded",
        ),
        (
            {"tensor": 2, "backend": "ray", "gpus_per_node": 2},
            ModelFacts("qwen3_moe", experts=8),
            "policy.megatron_cfg.sequence_parallel=true",
        ),
        ({"workers": 4, "gpus_per_node": 2}, None, "cluster.policy_workers=null"),
        ({"tensor": 3, "gpus_per_node": 2}, None, "policy.megatron_cfg.tensor_model_parallel_size=2"),
        (
            {"on_policy": True, "batch": 4, "prompts": 4, "group": 2},
            None,
            "policy.train_global_batch_size=8",
        ),
    ],
)
def test_what_a_model_or_the_devices_have_not_is_left_out(
    sizes: dict[str, Any], model: ModelFacts | None, mended: str
) -> None:
    assert mends(LayoutSizes(**sizes), model)[0] == mended


def test_several_updates_a_step_are_offered_where_only_one_is_asked_for() -> None:
    sizes = LayoutSizes(on_policy=True, batch=4, prompts=4, group=2)
    assert mends(sizes) == ["policy.train_global_batch_size=8", "loss_fn.force_on_policy_ratio=false"]
    assert mends(replace(sizes, batch=3)) == ["policy.train_global_batch_size=8"]


def test_no_more_nodes_are_offered_than_there_are() -> None:
    sizes = LayoutSizes(tensor=8, nodes=1, gpus_per_node=4, batch=8)
    assert "cluster.num_nodes=2" in mends(sizes)
    assert not any("num_nodes" in each for each in mends(sizes, most_nodes=1))


@pytest.mark.parametrize(
    ("tensor", "nodes", "most", "mended"),
    [(16, 3, 3, 2), (16, 5, 4, 4), (32, 6, 6, 4), (16, 3, 4, 4), (16, 3, None, 4)],
)
def test_where_there_are_no_more_nodes_fewer_are_offered(
    tensor: int, nodes: int, most: int | None, mended: int
) -> None:
    sizes = LayoutSizes(tensor=tensor, nodes=nodes, gpus_per_node=8)
    assert f"cluster.num_nodes={mended}" in mends(sizes, most_nodes=most)


def test_what_is_refused_alone_is_what_was_found() -> None:
    sizes = LayoutSizes(batch=3, backend="ray", gpus_per_node=8, tensor=3)
    found = misfits(sizes)
    assert [misfit.about for misfit in found] == ["devices"]
    refuse(sizes, found=[])
    other = Misfit("batch", "policy.batch", "another", "1", "2")
    with pytest.raises(ConfigError, match="another") as caught:
        refuse(sizes, found=[other])
    assert (caught.value.where, caught.value.expected, caught.value.found) == ("policy.batch", "1", "2")
    with pytest.raises(ConfigError, match="does not divide") as caught:
        refuse(sizes)
    assert len(caught.value.hints) == 2


@pytest.mark.parametrize(("tensor", "pipeline", "expert", "workers"), [(2, 1, 4, 4), (4, 1, 2, 4), (2, 2, 4, 8)])
def test_on_cpu_there_are_as_many_ranks_as_copies_and_experts_come_out_even_over(
    tensor: int, pipeline: int, expert: int, workers: int
) -> None:
    sizes = LayoutSizes(backend="ray", tensor=tensor, pipeline=pipeline, expert=expert, workers=1)
    assert f"cluster.policy_workers={workers}" in mends(sizes)


def test_overrides_are_what_differs_and_of_another_generator_its_name_alone() -> None:
    before = LayoutSizes(samples=True, length=8)
    after = replace(before, uses_vllm=True, generator_width=2, generator_experts=2, length=None, on_policy=True)
    assert overrides(before, before) == ""
    assert overrides(before, after) == (
        "loss_fn.force_on_policy_ratio=true policy.generation.backend=vllm policy.max_total_sequence_length=null"
    )
    assert overrides(after, before).startswith("loss_fn.force_on_policy_ratio=false policy.generation.backend=embedded")
    wider = replace(before, generator_width=2, router_bias_update_rate=0.5, dtensor=True, tensor=2)
    assert overrides(before, wider) == (
        "policy.dtensor_cfg.enabled=true policy.dtensor_cfg.tensor_parallel_size=2 "
        "policy.megatron_cfg.moe_router_bias_update_rate=0.5 policy.generation.vllm_cfg.tensor_parallel_size=2"
    )


@pytest.mark.parametrize(
    ("sizes", "mended"),
    [({"tensor": 3}, "tensor_model_parallel_size=4"), ({"expert": 7}, "expert_model_parallel_size=8")],
)
def test_the_next_power_of_two_is_as_near_as_the_last(sizes: dict[str, int], mended: str) -> None:
    """A mixture whose experts were to be spread over seven ranks is no more on one of them than on eight."""
    model = ModelFacts("qwen3_moe", attention_heads=32, experts=128)
    layout = LayoutSizes(sequence_parallel=True, backend="ray", gpus_per_node=8, **sizes)
    assert mends(layout, model)[0] == f"policy.megatron_cfg.{mended}"


def test_what_the_caller_does_not_accept_is_not_offered() -> None:
    sizes = LayoutSizes(expert=7, backend="ray", gpus_per_node=8)
    model = ModelFacts("qwen3_moe", experts=128)
    key = "policy.megatron_cfg.expert_model_parallel_size"
    assert mends(sizes, model, accepts=lambda after: after.expert < 8) == [f"{key}=4"]
    assert mends(sizes, model, accepts=lambda _: False) == []


def test_sizes_beyond_any_model_are_mended_without_looking_at_all_their_divisors() -> None:
    model = ModelFacts("llama", layers=720_720, attention_heads=16)
    sizes = LayoutSizes(tensor=720_720, pipeline=720_720, gpus_per_node=8, backend="ray")
    keys = ("tensor_model_parallel_size=8", "pipeline_model_parallel_size=1")
    assert mends(sizes, model)[0].split() == [f"policy.megatron_cfg.{key}" for key in keys]


def test_however_many_combinations_there_are_the_nearest_are_looked_at() -> None:
    sizes = {"tensor": 360, "pipeline": 360, "expert": 360, "context": 360, "generator_width": 360}
    options = _fewer({name: _near(size) for name, size in sizes.items()}, LayoutSizes(**sizes))
    assert math.prod(map(len, options.values())) <= 100_000
    assert all({1, 360, 180} < set(values) for values in options.values())
    few = {"tensor": 8, "pipeline": 4, "expert": 8, "context": 2, "generator_width": 1}
    options = {name: _near(size) for name, size in few.items()}
    assert _fewer(options, LayoutSizes(**few)) == {name: list(values) for name, values in options.items()}
