"""The layer's first half as one function against its pieces under autograd, over the same layout."""

from __future__ import annotations

import pytest
import torch

from nemotron_steps.engine.kernels.cpu_layers import attention_half
from nemotron_steps.engine.kernels.fused import rms_norm, split_heads
from nemotron_steps.engine.kernels.linear import linear
from nemotron_steps.engine.policy.attention.attention import flat_attention
from nemotron_steps.engine.policy.token_layout import build_layout
from tests.engine.policy.batches import grouped_batch

HIDDEN, WIDTH, EPS = 24, 16, 1e-6


def pieces(hidden, norm, qkv, head_norm, out, cos_sin, layout):
    groups = (qkv.shape[0] - out.shape[1]) // (2 * WIDTH)
    mixed = linear(rms_norm(hidden, norm, EPS), qkv).view(hidden.shape[0], groups, -1, WIDTH)
    attended = flat_attention(*split_heads(mixed, head_norm, cos_sin, EPS), layout)
    return hidden + linear(attended.view(*hidden.shape[:-1], -1), out)


@pytest.mark.compiler
@pytest.mark.parametrize("prompts", [((20, 3), (33, 3)), ((20, 4), (7, 1), (20, 2))])
@pytest.mark.parametrize(
    ("groups", "queries", "divisible_by", "normed"), [(2, 2, 1, True), (2, 1, 64, True), (1, 3, 8, False)]
)
def test_value_and_every_gradient(prompts, groups, queries, divisible_by, normed):
    batch = grouped_batch(prompts=prompts)
    layout = build_layout(batch, range(len(batch)), divisible_by=divisible_by)
    torch.manual_seed(0)
    tokens = layout.token_ids.shape[0]
    real = tokens - layout.padding
    shapes = [(tokens, 1, HIDDEN), (HIDDEN,), (groups * (queries + 2) * WIDTH, HIDDEN), (queries + 1, WIDTH)]
    leaves = [torch.randn(shape) for shape in [*shapes, (HIDDEN, groups * queries * WIDTH)]]
    leaves[2] *= HIDDEN**-0.5
    angles = torch.rand(tokens, 1, 1, WIDTH // 2).repeat(1, 1, 1, 2)
    cos_sin = torch.stack((angles.cos(), angles.sin()))
    grad = torch.randn(shapes[0])
    grad[real:] = 0  # nothing is predicted from padding
    mine, theirs = ([leaf.clone().requires_grad_() for leaf in leaves] for _ in range(2))
    if not normed:
        mine[3] = theirs[3] = None
    found = attention_half(*mine, cos_sin, layout.spans, EPS)
    found.backward(grad)
    expected = pieces(*theirs, cos_sin, layout)
    expected.backward(grad)
    torch.testing.assert_close(found[:real], expected[:real], atol=1e-4, rtol=1e-4)
    for one, other in zip(mine, theirs, strict=True):
        if one is not None:
            torch.testing.assert_close(one.grad, other.grad, atol=2e-3, rtol=1e-4)
