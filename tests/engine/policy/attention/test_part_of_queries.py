"""A part of the queries attends to all keys as it does among all queries."""

from __future__ import annotations

import pytest
import torch

from nemotron_steps.engine.policy.attention.attention import FlatAttention
from nemotron_steps.engine.policy.attention.part_of_queries import part_attention
from nemotron_steps.engine.policy.token_layout import build_layout
from tests.engine.policy.batches import grouped_batch

WIDTH = 8


@pytest.mark.parametrize("kept", [(0, 3, 4, 7), (1, 2, 5, 6), (0,), (7,), tuple(range(8))])
@pytest.mark.parametrize("share_prompts", [True, False])
def test_outputs_and_gradients_are_those_of_whole_attention(share_prompts, kept):
    batch = grouped_batch()
    layout = build_layout(batch, range(len(batch)), share_prompts=share_prompts, divisible_by=8)
    tokens = len(layout.token_ids)
    each = tokens // 8
    ranges = tuple((number * each, (number + 1) * each) for number in kept)
    mine = torch.cat([torch.arange(*own) for own in ranges])
    generator = torch.Generator().manual_seed(0)
    states = [torch.randn(tokens, heads, WIDTH, generator=generator).requires_grad_() for heads in (6, 2, 2)]
    upstream = torch.zeros(tokens, 6 * WIDTH)
    upstream[mine] = torch.randn(len(mine), 6 * WIDTH, generator=generator)
    upstream[tokens - layout.padding :] = 0

    whole = FlatAttention(None)(*states, layout)
    expected = torch.autograd.grad(whole, states, upstream)
    query, key, value = states
    part = part_attention(query[mine], key, value, layout.part(ranges))
    real = mine < tokens - layout.padding
    torch.testing.assert_close(part[real], whole[mine[real]], atol=2e-6, rtol=0)
    for gradient, theirs in zip(torch.autograd.grad(part, states, upstream[mine]), expected, strict=True):
        torch.testing.assert_close(gradient, theirs, atol=5e-6, rtol=0)


def test_a_rank_with_nothing_but_padding_takes_part_in_the_backward_pass():
    """Else the ranks that exchange gradients with it would wait for ever."""
    layout = build_layout(grouped_batch(), [7, 8], divisible_by=64)
    tokens = len(layout.token_ids)
    assert layout.padding > 2
    states = [
        torch.randn(count, heads, WIDTH, requires_grad=True) for count, heads in ((2, 4), (tokens, 1), (tokens, 1))
    ]
    out = part_attention(*states, layout.part(((tokens - 2, tokens),)))
    assert out.isfinite().all()
    gradients = torch.autograd.grad(out, states, torch.zeros_like(out))
    assert not any(gradient.any() for gradient in gradients)
