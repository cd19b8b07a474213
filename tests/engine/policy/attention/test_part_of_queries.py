"""A part of the queries attends to all keys as it does among all queries."""

from __future__ import annotations

import pytest
import torch

from nemotron_steps.engine.kernels.varlen import to_device
from nemotron_steps.engine.policy.attention.attention import flat_attention
from nemotron_steps.engine.policy.attention.few_heads import part_attention
from nemotron_steps.engine.policy.token_layout import build_layout
from tests.engine.policy.batches import grouped_batch

WIDTH = 16
KINDS = {
    "cpu": (torch.float32, 5e-6, 0.0),
    "cuda": (torch.bfloat16, 0.05, 0.02),
}
"""Where, in what, and how near to whole attention there."""


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("kept", [(0, 3, 4, 7), (1, 2, 5, 6), (0,), (7,), tuple(range(8))])
@pytest.mark.parametrize("share_prompts", [True, False])
def test_outputs_and_gradients_are_those_of_whole_attention(share_prompts, kept, device):
    dtype, atol, rtol = KINDS[device]
    batch = grouped_batch()
    layout = build_layout(batch, range(len(batch)), share_prompts=share_prompts, divisible_by=8)
    layout = to_device(layout, torch.device(device))
    tokens = len(layout.token_ids)
    each = tokens // 8
    ranges = tuple((number * each, (number + 1) * each) for number in kept)
    mine = torch.cat([torch.arange(*own) for own in ranges])
    generator = torch.Generator().manual_seed(0)
    shapes = (6, WIDTH), (2, WIDTH), (2, WIDTH), (6 * WIDTH,)
    made = [torch.randn(tokens, *shape, generator=generator).to(device, dtype) for shape in shapes]
    states, upstream = [tensor.requires_grad_() for tensor in made[:3]], torch.zeros_like(made[3])
    mine = mine[mine < tokens - layout.padding].to(device)
    upstream[mine] = made[3][mine]

    whole = flat_attention(*states, layout)
    expected = torch.autograd.grad(whole, states, upstream)
    query, key, value = states
    asking = torch.cat([query[first:after] for first, after in ranges])
    part = part_attention(asking, key, value, layout.part(ranges))
    torch.testing.assert_close(part[: len(mine)], whole[mine], atol=atol, rtol=rtol)
    given = torch.cat([upstream[first:after] for first, after in ranges])
    for gradient, theirs in zip(torch.autograd.grad(part, states, given), expected, strict=True):
        torch.testing.assert_close(gradient, theirs, atol=atol, rtol=rtol)


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
