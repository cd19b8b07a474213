"""A rank's rows of the output layer: which of them are tokens, and what is known of tokens that others have."""

from __future__ import annotations

import pytest
import torch

from nemotron_steps.engine.policy.logprob import OutputLayer


@pytest.mark.parametrize(("start", "rows"), [(0, 4), (4, 4), (8, 2), (12, 0), (16, 0)])
def test_padded_rows_stand_for_no_token(start, rows):
    assert OutputLayer(8, vocab_size=10, vocab_start=start).rows(torch.ones(4, 3)).shape == (rows, 3)


def test_tokens_of_other_ranks_are_not_this_ones():
    layer, logits = OutputLayer(8, vocab_size=12, vocab_start=4), torch.arange(8.0).view(2, 4)
    found, mine, columns = layer.at(logits, torch.tensor([[3, 4, 7, 8], [7, 5, 0, 11]]))
    assert mine.tolist() == [[False, True, True, False], [True, True, False, False]]
    assert found.tolist() == [[0.0, 0.0, 3.0, 0.0], [7.0, 5.0, 0.0, 0.0]]
    assert columns[mine].tolist() == [0, 3, 3, 1]
    none = layer.at(logits[:, :0], torch.tensor([[4], [5]]))
    assert none[0].tolist() == [[0.0], [0.0]] and not none[1].any()
