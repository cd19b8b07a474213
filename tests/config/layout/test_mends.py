"""Overrides that mend a layout: the nearest, and such that nothing is left to refuse."""

from __future__ import annotations

import pytest

from nemotron_steps.config.layout.facts import ModelFacts
from nemotron_steps.config.layout.mends import mends
from nemotron_steps.config.layout.sizes import LayoutSizes


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


@pytest.mark.parametrize(("tensor", "pipeline", "expert", "workers"), [(2, 1, 4, 4), (4, 1, 2, 4), (2, 2, 4, 8)])
def test_on_cpu_there_are_as_many_ranks_as_copies_and_experts_come_out_even_over(
    tensor: int, pipeline: int, expert: int, workers: int
) -> None:
    sizes = LayoutSizes(backend="ray", tensor=tensor, pipeline=pipeline, expert=expert, workers=1)
    assert f"cluster.policy_workers={workers}" in mends(sizes)
