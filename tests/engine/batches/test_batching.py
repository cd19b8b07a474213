from __future__ import annotations

import pytest
import torch

from nemotron_steps.engine.batches.batching import fixed_micro_batches, pad_rows, select_rows, split_batch
from nemotron_steps.errors import ConfigError, EngineError
from tests.engine.engine_samples import random_batch, rollout


def test_rollouts_are_padded_right_and_to_a_multiple() -> None:
    rollouts = [rollout(response=3), rollout(index=1, response=4)]
    batch = pad_rows(rollouts, torch.ones(2), pad_token_id=9, length_multiple=8)
    assert batch.input_ids.tolist() == [[1, 2, 3, 4, 5, 9, 9, 9], [1, 2, 3, 4, 5, 6, 9, 9]]
    assert batch.lengths.tolist() == [5, 6]
    assert batch.token_mask.tolist() == [[0, 0, 1, 1, 1, 0, 0, 0], [0, 0, 1, 1, 1, 1, 0, 0]]
    assert batch.generation_logprobs[1].tolist() == pytest.approx([0, 0] + [-0.51] * 4 + [0, 0])


def test_rollouts_that_are_not_token_aligned_are_refused() -> None:
    with pytest.raises(EngineError, match="not token-aligned"):
        pad_rows([rollout(logprobs=[0.0])], torch.ones(1))
    with pytest.raises(EngineError, match="first token"):
        pad_rows([rollout(prompt=0)], torch.ones(1))


def test_selecting_rows_narrows_every_tensor_but_never_cuts_a_sequence() -> None:
    batch, _ = random_batch(rows=5, width=9, seed=1)
    rows = [4, 0]
    width = int(batch.lengths[rows].max())
    chosen = select_rows(batch, rows, width=width)
    assert chosen.input_ids.tolist() == batch.input_ids[rows, :width].tolist()
    assert chosen.sample_mask.tolist() == batch.sample_mask[rows].tolist()
    assert chosen.reference_logprobs is not None and chosen.reference_logprobs.shape == (2, width)
    with pytest.raises(EngineError, match="cut"):
        select_rows(batch, rows, width=width - 1)


def test_splitting_gives_consecutive_global_batches_or_refuses() -> None:
    batch, _ = random_batch(rows=6)
    parts = list(split_batch(batch, 2))
    assert torch.equal(torch.cat([p.input_ids for p in parts]), batch.input_ids)
    with pytest.raises(ConfigError, match="6 rollouts"):
        list(split_batch(batch, 4))


def test_fixed_micro_batches_keep_the_rest() -> None:
    assert fixed_micro_batches(5, 2) == [[0, 1], [2, 3], [4]]
