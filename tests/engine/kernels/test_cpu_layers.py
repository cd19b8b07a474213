"""A layer's halves as functions of their own, in C or by torch, against their pieces under autograd."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from nemotron_steps.engine.kernels import cpu_layers
from nemotron_steps.engine.kernels.cpu_layers import attend, attend_backward, attention_half, feed_forward
from nemotron_steps.engine.kernels.fused import linear, rms_norm, split_heads
from nemotron_steps.engine.policy.layers import flat_attention
from nemotron_steps.engine.policy.token_layout import build_layout
from tests.conditioning import assert_conditioned, in_float64, with_gradients
from tests.engine.policy.batches import grouped_batch

EPS, HIDDEN = 1e-6, 24
LAYOUTS = {
    "families": ((20, 3), (33, 3)),
    "uniform": ((20, 4), (20, 4), (20, 4)),
    "ragged": ((5, 1), (40, 3), (7, 2)),
    "unshared": ((9, 1), (40, 1), (3, 1), (21, 1)),
    "blocks": ((150, 3), (70, 2)),  # rows longer than a block of queries
}
SHAPES = [(2, 2, 32, 1, True), (2, 1, 16, 64, True), (1, 3, 48, 8, False), (1, 1, 64, 1, True), (2, 4, 128, 1, False)]
"""Key-value heads, queries of each, head size, what tokens are a multiple of, and whether heads are normed."""


def inputs(prompts, groups, queries, width, divisible_by=1):
    """The layout, mixed, head norm, cos_sin and the gradient of what is attended, 0 where the layout is padded."""
    batch = grouped_batch(prompts=prompts, width=260 if prompts[0][0] > 100 else 60)
    layout = build_layout(batch, range(len(batch)), divisible_by=divisible_by)
    generator = torch.Generator().manual_seed(0)
    tokens = layout.token_ids.shape[0]
    mixed = torch.randn(tokens, groups, queries + 2, width, generator=generator)
    norm = torch.randn(queries + 1, width, generator=generator)
    angles = torch.rand(tokens, 1, 1, width // 2, generator=generator).repeat(1, 1, 1, 2)
    grad = torch.randn(tokens, groups, queries * width, generator=generator)
    grad[tokens - layout.padding :] = 0
    return layout, mixed, norm, torch.stack((angles.cos(), angles.sin())), grad


def assert_attends(prompts, groups, queries, width, divisible_by, normed):
    layout, mixed, norm, cos_sin, grad = inputs(prompts, groups, queries, width, divisible_by)
    pairs = []
    for _ in range(2):
        pairs.append([mixed.clone().requires_grad_(), norm.clone().requires_grad_() if normed else None])
    found = cpu_layers.native_attention(*pairs[0], cos_sin, layout, EPS)
    expected = flat_attention(*split_heads(*pairs[1], cos_sin, EPS), layout)
    for out in (found, expected):
        out.backward(grad.flatten(1))
    real = mixed.shape[0] - layout.padding
    torch.testing.assert_close(found[:real], expected[:real], atol=5e-6, rtol=1e-4)
    assert not found[real:].any()
    for mine, other in zip(*pairs, strict=True):
        if mine is not None:
            torch.testing.assert_close(mine.grad, other.grad, atol=1e-4, rtol=1e-4)


@pytest.mark.compiler
@pytest.mark.parametrize("prompts", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize(("groups", "queries", "width", "divisible_by", "normed"), SHAPES)
def test_attention_and_every_gradient(prompts, groups, queries, width, divisible_by, normed):
    assert_attends(prompts, groups, queries, width, divisible_by, normed)


@pytest.mark.compiler
@pytest.mark.usefixtures("kernels_for")
@pytest.mark.parametrize("width", [10, 32, 48])
def test_attention_with_vectors_of_any_width(width):
    assert_attends(LAYOUTS["ragged"], 2, 3, width, 8, normed=True)


@pytest.mark.compiler
def test_any_number_of_threads_and_any_scratch_give_the_same_bits():
    """Whatever the memory held, numbers that are none included, and whichever rows the thread had before."""
    layout, mixed, norm, cos_sin, grad = inputs(LAYOUTS["blocks"], 1, 3, 48)

    def everything():
        attended, lse = attend(mixed, norm, cos_sin, layout, EPS)
        return attended, lse, *attend_backward(grad, mixed, lse, norm, cos_sin, layout, EPS)

    before, results = torch.get_num_threads(), [everything()]
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(everything())
        torch.use_deterministic_algorithms(True)  # fills what torch.empty returns with NaN
        assert torch.empty(9).isnan().all()
        results.append(everything())
    finally:
        torch.set_num_threads(before)
        torch.use_deterministic_algorithms(False)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.compiler
@pytest.mark.parametrize(("groups", "queries", "divisible_by", "normed"), [(2, 1, 64, True), (1, 3, 8, False)])
def test_the_attention_half_and_every_gradient(groups, queries, divisible_by, normed):
    width = 16
    layout, _, head_norm, cos_sin, _ = inputs(LAYOUTS["families"], groups, queries, width, divisible_by)
    torch.manual_seed(0)
    tokens = layout.token_ids.shape[0]
    real = tokens - layout.padding
    shapes = [(tokens, 1, HIDDEN), (HIDDEN,), (groups * (queries + 2) * width, HIDDEN)]
    leaves = [torch.randn(shape) for shape in shapes] + [head_norm, torch.randn(HIDDEN, groups * queries * width)]
    leaves[2] *= HIDDEN**-0.5
    grad = torch.randn(shapes[0])
    grad[real:] = 0  # nothing is predicted from padding
    mine, theirs = ([leaf.clone().requires_grad_() for leaf in leaves] for _ in range(2))
    if not normed:
        mine[3] = theirs[3] = None
    found = attention_half(*mine, cos_sin, layout, EPS)
    hidden, norm, qkv, heads, out = theirs
    mixed = linear(rms_norm(hidden, norm, EPS), qkv).view(tokens, groups, -1, width)
    attended = flat_attention(*split_heads(mixed, heads, cos_sin, EPS), layout)
    expected = hidden + linear(attended.view(tokens, 1, -1), out)
    for result in (found, expected):
        result.backward(grad)
    torch.testing.assert_close(found[:real], expected[:real], atol=1e-4, rtol=1e-4)
    for one, other in zip(mine, theirs, strict=True):
        if one is not None:
            torch.testing.assert_close(one.grad, other.grad, atol=2e-3, rtol=1e-4)


def gated_mlp(hidden, norm, up, down, eps):
    gate, states = F.linear(F.rms_norm(hidden, norm.shape, norm, eps), up).chunk(2, dim=-1)
    return hidden + F.linear(F.silu(gate) * states, down)


def assert_feeds_forward(hidden=24, ffn=40):
    torch.manual_seed(0)
    shapes = ((70, 1, hidden), (hidden,), (2 * ffn, hidden), (hidden, ffn))
    given = [torch.randn(shapes[0]), *(torch.randn(shape) for shape in shapes)]
    found = with_gradients(partial(feed_forward, eps=EPS), *given)
    assert_conditioned(found, in_float64(partial(gated_mlp, eps=EPS)), *given)


@pytest.mark.compiler
@pytest.mark.usefixtures("kernels_for")
@pytest.mark.parametrize(("hidden", "ffn"), [(3, 5), (24, 40), (20, 33)])
def test_the_feed_forward_half_with_vectors_of_any_width(hidden, ffn):
    assert_feeds_forward(hidden, ffn)


@pytest.mark.compiler
def test_states_and_a_gradient_that_do_not_lie_row_by_row():
    hidden, grad = torch.randn(24, 1, 70).transpose(0, 2), torch.ones(()).expand(70, 1, 24)
    weights = [torch.randn(24), torch.randn(2 * 40, 24), torch.randn(24, 40)]
    results = []
    for order in (torch.Tensor.clone, torch.Tensor.contiguous):
        leaf = order(hidden).requires_grad_()
        out = feed_forward(leaf, *weights, EPS)
        out.backward(grad if order is torch.Tensor.clone else grad.contiguous())
        results.append((out.detach(), leaf.grad))
    assert not hidden.is_contiguous()
    for scattered, rows in zip(*results, strict=True):
        torch.testing.assert_close(scattered, rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(6,), (2, 6)], ids=str)
def test_eps_is_added_to_the_mean_square(shape, dtype):
    states, weight = torch.full((4, 2, 6), 1e-3, dtype=dtype), torch.full(shape, 2.0, dtype=dtype)
    found = rms_norm(states, weight, 3e-6)
    assert found.dtype is dtype
    torch.testing.assert_close(found.float(), torch.ones(4, 2, 6), atol=0.01, rtol=0)
