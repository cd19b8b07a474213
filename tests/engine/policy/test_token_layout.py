"""Flattening: every token is in its place, shared prompts appear once, and attention sees what it should."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemotron_steps.config.schema.policy import GeneratingPolicyConfig, PolicyConfig
from nemotron_steps.engine.policy.micro_batches import plan_micro_batches, row_use
from nemotron_steps.engine.policy.token_layout import build_layout
from nemotron_steps.errors import ConfigError
from tests.engine.policy.batches import grouped_batch

groups = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 4)), min_size=1, max_size=5)


@settings(max_examples=60, deadline=None)
@given(prompts=groups, seed=st.integers(0, 10_000), divisible_by=st.sampled_from([1, 4]), share=st.booleans())
def test_every_trained_token_is_predicted_from_its_own_past(prompts, seed, divisible_by, share):
    total = sum(count for _, count in prompts)
    batch = grouped_batch(seed, prompts=(*prompts, (3, max(4 - total, 1))), width=16)
    rows = list(range(len(batch)))[::-1]
    layout = build_layout(batch, rows, share_prompts=share, divisible_by=divisible_by)
    width = layout.shape[1]
    assert len(layout.token_ids) % divisible_by == 0
    assert layout.shape == (len(rows), int(batch.lengths.max()))
    trained = batch.token_mask[rows][:, :width] > 0
    assert sorted(layout.cells.tolist()) == torch.nonzero(trained.flatten()).flatten().tolist()
    visible = _visible(layout)
    for source, target, cell in zip(
        layout.source.tolist(), layout.targets.tolist(), layout.cells.tolist(), strict=True
    ):
        row, column = rows[cell // width], cell % width
        past = visible[source]
        assert target == int(batch.input_ids[row, column])
        assert [int(layout.positions[token]) for token in past] == list(range(column))
        assert [int(layout.token_ids[token]) for token in past] == batch.input_ids[row, :column].tolist()


def _visible(layout):
    """Flat tokens that each flat token attends to, by the layout's own grids and mask."""
    visible = {}
    whole = _cells(layout.whole, 0)
    for row in whole:
        for end in range(len(row)):
            visible[row[end]] = row[: end + 1]
    if layout.suffix is None:
        return visible
    for number, row in enumerate(_cells(layout.suffix, layout.whole_tokens)):
        prompt = whole[int(layout.parent[number])]
        for end, token in enumerate(row):
            seen = layout.mask[number, 0, end]
            assert seen[: layout.whole.width].nonzero().flatten().tolist() == list(range(len(prompt)))
            own = seen[layout.whole.width :].nonzero().flatten().tolist()
            visible[token] = [*prompt, *(row[position] for position in own)]
            assert own == list(range(end + 1))
    return visible


def _cells(grid, first):
    if grid.pad is None:
        return [[first + row * grid.width + column for column in range(grid.width)] for row in range(grid.rows)]
    cells = grid.pad.view(grid.rows, grid.width) + first
    return [cells[row][grid.valid[row]].tolist() for row in range(grid.rows)]


def test_a_shared_prompt_is_computed_once():
    batch = grouped_batch(prompts=((40, 8),), width=60)
    shared = build_layout(batch, range(8))
    alone = build_layout(batch, range(8), share_prompts=False)
    assert len(alone.token_ids) - len(shared.token_ids) == 7 * 40
    assert shared.suffix.rows == 8


@settings(max_examples=60, deadline=None)
@given(
    prompts=groups,
    data_ranks=st.integers(1, 4),
    unit=st.sampled_from([1, 2]),
    mode=st.sampled_from(["fixed", "packed", "dynamic"]),
    size=st.integers(1, 5),
    padded=st.booleans(),
)
def test_a_plan_holds_every_row_once_and_keeps_units_together(prompts, data_ranks, unit, mode, size, padded):
    batch = grouped_batch(prompts=(*prompts, (3, 4)), width=16)
    rows = list(range(len(batch) // unit * unit))
    budget = {"enabled": True, "train_mb_tokens": 40, "sequence_length_round": 1}
    config = PolicyConfig.model_validate(
        {
            "train_micro_batch_size": size,
            **({"sequence_packing": budget} if mode == "packed" else {}),
            **({"dynamic_batching": budget} if mode == "dynamic" else {}),
        }
    )
    plan = plan_micro_batches(batch, rows, config, data_ranks, train=True, unit=unit, padded=padded)
    assert len(plan) == data_ranks
    assert sorted(row for share in plan for part in share for row in part) == rows
    for part in (part for share in plan for part in share):
        assert part and all(part[at] + offset == part[at + offset] for at in range(0, len(part), unit)
                            for offset in range(unit))  # fmt: skip
        lengths = [int(batch.lengths[row]) for row in part]
        if mode == "fixed":
            assert len(part) <= size * unit
        elif padded:
            assert max(lengths) * len(lengths) <= 40
        else:
            assert len(build_layout(batch, part).token_ids) <= 40


def test_micro_batches_of_pairs_are_counted_in_pairs():
    batch = grouped_batch(prompts=((30, 4), (28, 4)), width=34)
    config = PolicyConfig.model_validate({"train_micro_batch_size": 2, "logprob_batch_size": 4})
    assert plan_micro_batches(batch, range(8), config, 1, train=True, unit=2) == [[[0, 1, 2, 3], [4, 5, 6, 7]]]
    assert plan_micro_batches(batch, range(8), config, 1, train=False, unit=2) == [[[*range(8)]]]


def test_rollouts_of_one_prompt_share_a_micro_batch():
    batch = grouped_batch(prompts=((30, 4), (28, 4), (31, 4)), width=34)
    budget = {"enabled": True, "train_mb_tokens": 48, "sequence_length_round": 1}
    for mode in ("sequence_packing", "dynamic_batching"):
        config = PolicyConfig.model_validate({mode: budget})
        ((first, second, third),) = plan_micro_batches(batch, range(12), config, 1, train=True)
        assert sorted([first, second, third]) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
        too_small = PolicyConfig.model_validate({mode: {**budget, "train_mb_tokens": 20}})
        with pytest.raises(ConfigError, match="does not fit") as caught:
            plan_micro_batches(batch, range(12), too_small, 1, train=True)
        assert caught.value.where == f"policy.{mode}.train_mb_tokens"


@pytest.mark.parametrize("mode", ["sequence_packing", "dynamic_batching"])
def test_without_a_budget_the_longest_rows_fit_whatever_the_step_and_the_unit(mode):
    settings = {"train_micro_batch_size": 1, "logprob_batch_size": 1, mode: {"enabled": True}}
    limits = {"max_total_sequence_length": 20, "max_total_sequence_length_end": 60}
    batch = grouped_batch(prompts=((50, 4),), width=60)
    batch.lengths[:] = 60
    raised = GeneratingPolicyConfig.model_validate({**settings, **limits})
    for train in (True, False):
        ((*parts,),) = plan_micro_batches(batch, range(4), raised, 1, train=train)
        assert sorted(row for part in parts for row in part) == [0, 1, 2, 3]
    pairs = PolicyConfig.model_validate({**settings, "max_total_sequence_length": 60})
    for padded in (False, True):  # of padded rows, 60 tokens count as 64
        ((*parts,),) = plan_micro_batches(batch, range(4), pairs, 1, train=True, unit=2, padded=padded)
        assert sorted(row for part in parts for row in part) == [0, 1, 2, 3]


@pytest.mark.parametrize("needs_advantage", [True, False])
def test_rows_are_sorted_by_what_they_are_good_for(needs_advantage):
    batch = grouped_batch()
    batch.advantages = batch.advantages.clone()
    batch.advantages[4] = 0
    batch.advantages[5] = float("nan")
    use = row_use(batch, needs_advantage=needs_advantage)
    assert 3 not in use.gradient + use.metrics  # masked
    assert 5 in use.gradient
    assert (4 in use.metrics) == needs_advantage and (4 in use.gradient) != needs_advantage
