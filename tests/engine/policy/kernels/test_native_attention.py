"""The attention kernel in C against scaled_dot_product_attention over the same layout, gradients included."""

from __future__ import annotations

import pytest
import torch

from nemotron_steps.engine.kernels.cpu_layers import attend, attend_backward, native_attention
from nemotron_steps.engine.kernels.fused import split_heads
from nemotron_steps.engine.policy.attention.attention import flat_attention
from nemotron_steps.engine.policy.token_layout import TokenLayout, build_layout
from tests.engine.policy.batches import grouped_batch

pytestmark = pytest.mark.compiler

EPS = 1e-6
LAYOUTS = {
    "families": ((20, 3), (33, 3)),
    "uniform": ((20, 4), (20, 4), (20, 4)),
    "ragged": ((5, 1), (40, 3), (7, 2)),
    "unshared": ((9, 1), (40, 1), (3, 1), (21, 1)),
}


def inputs(layout: TokenLayout, groups: int, queries: int, width: int):
    """mixed, norm, cos_sin and the gradient of what is attended, 0 where the layout is padded."""
    generator = torch.Generator().manual_seed(0)
    tokens = layout.token_ids.shape[0]
    mixed = torch.randn(tokens, groups, queries + 2, width, generator=generator)
    norm = torch.randn(queries + 1, width, generator=generator)
    angles = torch.rand(tokens, 1, 1, width // 2, generator=generator).repeat(1, 1, 1, 2)
    grad = torch.randn(tokens, groups, queries * width, generator=generator)
    grad[tokens - layout.padding :] = 0
    return mixed, norm, torch.stack((angles.cos(), angles.sin())), grad


@pytest.mark.parametrize("prompts", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize(
    ("groups", "queries", "width", "divisible_by", "normed"),
    [(2, 2, 32, 1, True), (2, 1, 16, 64, True), (1, 3, 48, 8, False), (1, 1, 64, 1, True), (2, 4, 128, 1, False)],
)
def test_value_and_every_gradient(prompts, groups, queries, width, divisible_by, normed):
    assert_same(prompts, groups, queries, width, divisible_by, normed)


@pytest.mark.usefixtures("kernels_for")
@pytest.mark.parametrize("width", [10, 32, 48])
def test_it_does_with_vectors_of_any_width(width):
    assert_same(LAYOUTS["ragged"], 2, 3, width, 8, normed=True)


def assert_same(prompts, groups, queries, width, divisible_by, normed):
    batch = grouped_batch(prompts=prompts)
    layout = build_layout(batch, range(len(batch)), divisible_by=divisible_by)
    mixed, norm, cos_sin, grad = inputs(layout, groups, queries, width)
    norm = norm if normed else None
    leaves = [leaf.clone().requires_grad_() for leaf in (mixed, norm) if leaf is not None]
    theirs = [leaf.clone().requires_grad_() for leaf in (mixed, norm) if leaf is not None]
    found = native_attention(*leaves, *[None] * (2 - len(leaves)), cos_sin, layout.spans, EPS)
    found.backward(grad.flatten(1))
    expected = flat_attention(*split_heads(*theirs, *[None] * (2 - len(theirs)), cos_sin, EPS), layout)
    expected.backward(grad.flatten(1))
    real = mixed.shape[0] - layout.padding
    torch.testing.assert_close(found[:real], expected[:real], atol=2e-6, rtol=1e-4)
    assert not found[real:].any()
    for mine, other in zip(leaves, theirs, strict=True):
        torch.testing.assert_close(mine.grad, other.grad, atol=5e-5, rtol=1e-4)


def test_rows_longer_than_a_block_of_queries():
    batch = grouped_batch(prompts=((150, 3), (70, 2)), width=260)
    layout = build_layout(batch, range(len(batch)))
    mixed, norm, cos_sin, grad = inputs(layout, 1, 2, 32)
    mine, theirs = (mixed.clone().requires_grad_() for _ in range(2))
    native_attention(mine, norm, cos_sin, layout.spans, EPS).backward(grad.flatten(1))
    flat_attention(*split_heads(theirs, norm, cos_sin, EPS), layout).backward(grad.flatten(1))
    torch.testing.assert_close(mine.grad, theirs.grad, atol=5e-5, rtol=1e-4)


def test_any_number_of_threads_gives_the_same_bits():
    batch = grouped_batch()
    layout = build_layout(batch, range(len(batch)))
    mixed, norm, cos_sin, grad = inputs(layout, 2, 2, 32)

    def everything():
        attended, lse = attend(mixed, norm, cos_sin, layout.spans, EPS)
        return attended, lse, *attend_backward(grad, mixed, lse, norm, cos_sin, layout.spans, EPS)

    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(everything())
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_nothing_is_read_from_scratch_before_it_is_written():
    """Whatever the memory held, numbers that are none included, and whichever rows the thread had before."""
    batch = grouped_batch(prompts=((150, 3), (70, 2)), width=260)
    layout = build_layout(batch, range(len(batch)))
    mixed, norm, cos_sin, grad = inputs(layout, 1, 3, 48)

    def everything():
        attended, lse = attend(mixed, norm, cos_sin, layout.spans, EPS)
        return attended, lse, *attend_backward(grad, mixed, lse, norm, cos_sin, layout.spans, EPS)

    expected = everything()
    torch.use_deterministic_algorithms(True)  # fills what torch.empty returns with NaN
    try:
        assert torch.empty(9).isnan().all()
        found = everything()
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
