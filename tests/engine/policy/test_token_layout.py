"""Flattening: every token is in its place, shared prompts appear once, and attention sees what it should."""

from collections import Counter
from dataclasses import fields, is_dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemotron_steps.config.schema.policy import GeneratingPolicyConfig, PolicyConfig
from nemotron_steps.engine.policy.micro_batches import plan_micro_batches, row_use
from nemotron_steps.engine.policy.token_layout import VarlenSegments, build_layout, to_device
from nemotron_steps.errors import ConfigError
from tests.engine.policy.batches import grouped_batch
from tests.engine.policy.routes import some_routes

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


@settings(max_examples=60, deadline=None)
@given(prompts=groups, seed=st.integers(0, 10_000), depths=st.integers(1, 3), changed=st.integers(0, 99))
def test_what_reads_ahead_reads_its_own_sequence_where_prompts_end_otherwise_too(prompts, seed, depths, changed):
    total = sum(count for _, count in prompts)
    batch = grouped_batch(seed, prompts=(*prompts, (3, max(4 - total, 1))), width=16)
    row = changed % len(batch)
    batch.input_ids[row, int(batch.token_mask[row].argmax()) - 1] += 1  # the last token of one row's prompt
    layout = build_layout(batch, range(len(batch)), ahead=depths, divisible_by=4)
    visible, width = _visible(layout), layout.shape[1]
    for depth, ahead in enumerate(layout.ahead, start=1):
        cells = torch.nonzero((batch.token_mask[:, :width] > 0).flatten()).flatten().tolist()
        assert sorted(ahead.cells.tolist()) == [cell for cell in cells if cell % width > depth]
        read = zip(ahead.source.tolist(), ahead.targets.tolist(), ahead.cells.tolist(), strict=True)
        for source, target, cell in read:
            row, column = divmod(cell, width)
            ids = batch.input_ids[row].tolist()
            assert target == ids[column]
            assert [int(layout.token_ids[token]) for token in visible[source]] == ids[: column - depth]
            assert [int(ahead.token_ids[token]) for token in visible[source]] == ids[depth:column]


@settings(max_examples=60, deadline=None)
@given(prompts=groups, seed=st.integers(0, 10_000), share=st.booleans(), idle=st.booleans())
def test_each_token_counts_as_often_as_sequences_have_it(prompts, seed, share, idle):
    """Also those of sequences that others carry, whose answers are one token."""
    total = sum(count for _, count in prompts)
    batch = grouped_batch(seed, prompts=(*prompts, (3, max(4 - total, 1))), width=12)
    layout = build_layout(batch, range(len(batch)), share_prompts=share, divisible_by=4)
    layout.idle = idle
    expected, found = Counter(), Counter()
    for ids, length in zip(batch.input_ids.tolist(), batch.lengths.tolist(), strict=True):
        expected.update(enumerate(ids[: length - 1]))  # nothing is predicted from the last one
    places = zip(layout.positions.tolist(), layout.token_ids.tolist(), strict=True)
    for place, count in zip(places, to_device(layout, torch.device("cpu")).occurrences.tolist(), strict=True):
        found[place] += count
    assert +found == ({} if idle else expected)
    assert not layout.occurrences[len(layout.token_ids) - layout.padding :].any()


def parts_of(value, name=""):
    """(path, value) of everything in nested dataclasses, without what is computed when it is asked for."""
    if not is_dataclass(value):
        yield name, value
        return
    for each in fields(value):
        if each.name != "runs" and not each.name.startswith("_"):
            yield from parts_of(getattr(value, each.name), f"{name}.{each.name}")


@pytest.mark.parametrize("idle", [False, True])
def test_on_another_device_a_layout_is_whole(idle):
    """meta stands for a GPU: what is moved has no numbers there."""
    batch = grouped_batch()
    batch.routed_experts = some_routes(batch, 2, 2, 8)
    layout = build_layout(batch, range(len(batch)), ahead=2, divisible_by=64)
    layout = replace(layout, idle=idle, carried=((1, 3),))
    moved = dict(parts_of(to_device(layout, torch.device("meta"))))
    moved |= dict(parts_of(moved.pop(".ahead")[1], ".second"))
    here = dict(parts_of(layout))
    here |= dict(parts_of(here.pop(".ahead")[1], ".second"))
    assert set(moved) == set(here) and len(here) > 30
    for name, value in here.items():
        if not isinstance(value, torch.Tensor):
            assert moved[name] == value, name
            continue
        assert (moved[name].shape, moved[name].dtype) == (value.shape, value.dtype), name
        on_cpu = name in (".first_suffix", ".lengths")
        assert moved[name].device.type == ("cpu" if on_cpu else "meta"), name


def test_a_prompt_is_computed_once_for_rows_that_replay_the_same_experts_for_it():
    batch = grouped_batch(prompts=((6, 4),), width=20)
    batch.routed_experts = some_routes(batch, 2, 2, 8)
    batch.routed_experts[1:] = batch.routed_experts[0].clone()
    assert build_layout(batch, range(4)).whole_tokens == 6
    batch.routed_experts[2:, 3] = batch.routed_experts[2:, 3].flip(-1)  # of two rows, one of the prompt's tokens
    layout = build_layout(batch, range(4))
    assert layout.whole_tokens == 12 and layout.parent.tolist() == [0, 0, 1, 1]
    for number, row in enumerate((0, 2)):
        assert torch.equal(layout.routed_experts[6 * number : 6 * number + 6], batch.routed_experts[row, :6])


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


def test_a_budget_holds_the_ends_of_prompts_that_read_ahead():
    """Where answers are read ahead, the last tokens of a shared prompt are computed for each of them."""
    batch = grouped_batch(prompts=((10, 4),), width=14)
    batch.lengths[:] = 14
    packing = {"enabled": True, "train_mb_tokens": 28, "sequence_length_round": 1}
    config = PolicyConfig.model_validate({"sequence_packing": packing})
    for ahead, parts in ((0, [4]), (1, [3, 1]), (2, [3, 1]), (3, [3, 1]), (5, [2, 2])):
        (plan,) = plan_micro_batches(batch, range(4), config, 1, train=True, ahead=ahead)
        assert [len(part) for part in plan] == parts, ahead
        assert max(len(build_layout(batch, part, ahead=ahead).token_ids) for part in plan) <= 28


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("budget", "parts"), [(400, [4]), (200, [4]), (80, [4]), (79, [2, 2]), (40, [2, 2])])
def test_ranks_share_what_few_of_them_could_hold(budget, parts, padded):
    batch = grouped_batch(prompts=((10, 1),) * 16, width=20)
    batch.lengths[:] = 20
    mode = "dynamic_batching" if padded else "sequence_packing"
    cut = {"enabled": True, "train_mb_tokens": budget, "sequence_length_round": 1}
    config = PolicyConfig.model_validate({mode: cut})
    plan = plan_micro_batches(batch, range(16), config, 4, train=True, padded=padded)
    assert [[len(part) for part in share] for share in plan] == [parts] * 4
    few = plan_micro_batches(batch, range(2), config, 4, train=True, padded=padded)
    assert sorted(row for share in few for part in share for row in part) == [0, 1]  # fewer rows than ranks


@given(
    prompts=groups,
    data_ranks=st.integers(2, 5),
    budget=st.integers(17, 60),
    unit=st.sampled_from([1, 2]),
    padded=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_sharing_gives_no_rank_more_micro_batches_than_the_budget_makes(prompts, data_ranks, budget, unit, padded):
    batch = grouped_batch(prompts=(*prompts, (3, 4)), width=16)
    rows = list(range(len(batch) // unit * unit))
    mode = "dynamic_batching" if padded else "sequence_packing"
    cut = {"enabled": True, "train_mb_tokens": unit * budget, "sequence_length_round": 1}
    config = PolicyConfig.model_validate({mode: cut})
    ((*alone,),) = plan_micro_batches(batch, rows, config, 1, train=True, unit=unit, padded=padded)
    plan = plan_micro_batches(batch, rows, config, data_ranks, train=True, unit=unit, padded=padded)
    assert max(len(share) for share in plan) <= -(-len(alone) // data_ranks)


@pytest.mark.parametrize("mode", ["sequence_packing", "dynamic_batching"])
@pytest.mark.parametrize("padded", [False, True])
def test_inference_has_a_budget_of_its_own(mode, padded):
    batch = grouped_batch(prompts=((30, 1),) * 4, width=34)
    batch.lengths[:] = 32
    budget = {"enabled": True, "train_mb_tokens": 64, "logprob_mb_tokens": 32, "sequence_length_round": 1}
    config = PolicyConfig.model_validate({mode: budget})
    sizes = {
        train: [len(part) for part in plan_micro_batches(batch, range(4), config, 1, train=train, padded=padded)[0]]
        for train in (True, False)
    }
    assert sizes == {True: [2, 2], False: [1, 1, 1, 1]}
    config = PolicyConfig.model_validate({mode: {**budget, "logprob_mb_tokens": 31}})
    with pytest.raises(ConfigError) as caught:
        plan_micro_batches(batch, range(4), config, 1, train=False, padded=padded)
    assert caught.value.where == f"policy.{mode}.logprob_mb_tokens"
    assert caught.value.hints == (f"policy.{mode}.logprob_mb_tokens=32",)


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


PROMPT = (0, 4)
ROWS = [((), PROMPT), ((), (4, 6)), ((PROMPT,), (6, 9)), ((PROMPT,), (9, 14)), ((), (14, 16))]
"""A prompt, a row by itself, two rows that go on from the prompt, and padding."""


def test_a_run_sees_its_prompt_and_its_own_row_up_to_its_last_query():
    part = VarlenSegments(ROWS, ((2, 5), (8, 12)), torch.device("cpu"))
    assert [run.queries for run in part.segments] == [(2, 4), (4, 5), (8, 9), (9, 12)]
    keys = [[0, 1, 2, 3], [4], [0, 1, 2, 3, 6, 7, 8], [0, 1, 2, 3, 9, 10, 11]]
    assert part.keys.tolist() == [key for run in keys for key in run]
    assert [starts.tolist() for starts in part.cu_seqlens] == [[0, 2, 3, 4, 7], [0, 4, 5, 12, 19]]
    assert all(starts.dtype is torch.int32 and starts.is_contiguous() for starts in part.cu_seqlens)
    assert part.max_seqlens == (3, 7)
