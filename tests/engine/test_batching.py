"""None"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemotron_steps.engine.batching import (
    fixed_micro_batches,
    pad_rows,
    round_up,
    token_budget_micro_batches,
)
from nemotron_steps.errors import EngineError
from tests.engine.engine_samples import rollout


def test_rollouts_are_padded_right_and_to_a_multiple() -> None:
    rollouts = [rollout(response=3), rollout(index=1, response=4)]
    batch = pad_rows(rollouts, torch.tensor([True, False]), pad_token_id=9, length_multiple=8)
    assert batch.input_ids.tolist() == [[1, 2, 3, 4, 5, 9, 9, 9], [1, 2, 3, 4, 5, 6, 9, 9]]
    assert batch.lengths.tolist() == [5, 6]
    assert batch.sample_mask.dtype == torch.float32 and batch.sample_mask.tolist() == [1, 0]
    assert not batch.advantages.any() and batch.routed_experts is None
    assert batch.token_mask.tolist() == [[0, 0, 1, 1, 1, 0, 0, 0], [0, 0, 1, 1, 1, 1, 0, 0]]
    assert batch.generation_logprobs[1].tolist() == pytest.approx([0, 0] + [-0.51] * 4 + [0, 0])


@pytest.mark.parametrize(
    ("rows", "size", "unit", "batches"),
    [
        (6, 4, 2, [[0, 1, 2, 3], [4, 5]]),
        (6, 3, 2, [[0, 1], [2, 3], [4, 5]]),
        (0, 2, 1, []),
    ],
)
def test_fixed_micro_batches_part_no_unit(rows: int, size: int, unit: int, batches: list[list[int]]) -> None:
    assert fixed_micro_batches(rows, size, unit=unit) == batches
    with pytest.raises(EngineError, match="whole units of 2"):
        fixed_micro_batches(5, 2, unit=2)


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 20), max_size=16).map(lambda found: found[: len(found) // 2 * 2]),
    budget=st.integers(40, 90),
    multiple=st.sampled_from([1, 4]),
    unit=st.sampled_from([1, 2]),
)
def test_dynamic_batches_are_the_longest_first_each_as_full_as_it_can_be(
    lengths: list[int], budget: int, multiple: int, unit: int
) -> None:
    widths = [round_up(max(lengths[at : at + unit]), multiple) for at in range(0, len(lengths), unit)]
    longest = [max(lengths[at : at + unit]) for at in range(0, len(lengths), unit)]
    order = sorted(range(len(longest)), key=lambda number: (-longest[number], number))
    expected: list[list[int]] = []
    while order:
        room = budget // (widths[order[0]] * unit)
        expected.append([row for number in order[:room] for row in range(number * unit, number * unit + unit)])
        order = order[room:]
    assert token_budget_micro_batches(lengths, budget, length_multiple=multiple, unit=unit) == expected


def test_experts_are_padded_with_minus_one_where_nothing_is_known() -> None:
    experts = np.arange(8, dtype=np.int16).reshape(4, 1, 2)
    told, untold = rollout(response=4, routed_experts=experts), rollout(index=1, response=3)
    batch = pad_rows([told, untold], torch.ones(2), length_multiple=4)
    assert batch.routed_experts is not None and batch.routed_experts.dtype == torch.int16
    assert batch.routed_experts[0, :, 0].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]] + [[-1, -1]] * 4
    assert bool((batch.routed_experts[1] == -1).all())
    assert pad_rows([untold], torch.ones(1)).routed_experts is None
