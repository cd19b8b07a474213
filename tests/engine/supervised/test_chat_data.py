"""Which chats a step is given, and how they lie in its batch."""

from __future__ import annotations

import pytest

from nemotron_steps.engine.supervised.chat_tokens import ChatSequence
from nemotron_steps.engine.supervised.loop import batch_of, shuffled_batches

NUMBERS = range(11)


def drawn(batch_size: int = 3, *, epochs: int = 4, seed: int = 5, skip: int = 0) -> list[list[int]]:
    return list(shuffled_batches(NUMBERS, batch_size, epochs=epochs, seed=seed, skip=skip))


def test_every_epoch_has_each_example_once_at_most_in_an_order_of_its_own() -> None:
    batches = drawn()
    assert len(batches) == 12 and all(len(batch) == 3 for batch in batches)
    epochs = [[number for batch in batches[start : start + 3] for number in batch] for start in range(0, 12, 3)]
    assert all(len(set(epoch)) == 9 and set(epoch) <= set(NUMBERS) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert drawn() == batches and drawn(seed=6) != batches


@pytest.mark.parametrize("skip", range(13))
def test_a_resumed_run_goes_on_where_the_unbroken_one_would(skip: int) -> None:
    assert drawn(skip=skip) == drawn()[skip:]


def test_chats_lie_left_in_rows_as_wide_as_the_longest_rounded_up() -> None:
    chats = [ChatSequence([5, 6, 7], [0, 1, 1]), ChatSequence([8, 9, 10, 11, 12], [0, 0, 1, 0, 1])]
    batch = batch_of(chats, divisible_by=4)
    assert batch.input_ids.tolist() == [[5, 6, 7, 0, 0, 0, 0, 0], [8, 9, 10, 11, 12, 0, 0, 0]]
    assert batch.token_mask.tolist() == [[0, 1, 1, 0, 0, 0, 0, 0], [0, 0, 1, 0, 1, 0, 0, 0]]
    assert (batch.lengths.tolist(), batch.sample_mask.tolist()) == ([3, 5], [1, 1])
    assert bool((batch.advantages == 1).all()) and batch.packed_row is None
    assert batch_of(chats, divisible_by=5).input_ids.shape == batch_of(chats).input_ids.shape == (2, 5)
    assert batch_of(chats[:1], pad_id=3, divisible_by=4).input_ids.tolist() == [[5, 6, 7, 3]]
