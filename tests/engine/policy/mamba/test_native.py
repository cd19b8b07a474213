"""The kernel in C gives what the operators of torch give, and their gradients, on any number of threads."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemotron_steps.engine.native.compiler import library
from nemotron_steps.engine.policy.mamba.conv import conv
from nemotron_steps.engine.policy.mamba.gated_norm import gated_norm
from nemotron_steps.engine.policy.mamba.mixer import time_steps
from nemotron_steps.engine.policy.mamba.native import Sizes, native_mix
from nemotron_steps.engine.policy.mamba.runs import Runs
from nemotron_steps.engine.policy.mamba.scan import scan

pytestmark = pytest.mark.skipif(library() is None, reason="needs a C compiler")


def tensors(tokens: int, sizes: Sizes, kernel: int, bias: bool) -> list[torch.Tensor | None]:
    """As `native_mix` takes them."""
    inner = sizes.heads * sizes.head_dim
    channels = inner + 2 * sizes.groups * sizes.state
    generator = torch.Generator().manual_seed(tokens)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).requires_grad_()

    a = (-torch.randn(sizes.heads, generator=generator).exp()).requires_grad_()
    mixed, weight = normal(tokens, inner + channels + sizes.heads), normal(channels, 1, kernel)
    offset = normal(channels) if bias else None
    return [mixed, weight, offset, normal(sizes.heads), a, normal(sizes.heads), normal(inner)]


def by_operators(mixed, weight, bias, dt_bias, a, d, norm, runs, sizes):
    inner, shared = norm.shape[0], sizes.groups * sizes.state
    gate, states, dt = torch.split(mixed, [inner, weight.shape[0], sizes.heads], dim=1)
    parts = torch.split(conv(states, weight, bias, runs), [inner, shared, shared], dim=1)
    x, b, c = (part.view(len(part), n, -1) for part, n in zip(parts, (sizes.heads, sizes.groups, sizes.groups)))  # noqa: B905
    y, _ = scan(x, time_steps(dt, dt_bias, sizes.time_step_limit), a, b, c, d, runs, 16)
    return gated_norm(y.flatten(1), gate, norm, sizes.groups, sizes.eps)


def compare(runs: Runs, sizes: Sizes, kernel: int = 4, bias: bool = True) -> None:
    inputs = tensors(runs.tokens + runs.padding, sizes, kernel, bias)
    wanted = [tensor for tensor in inputs if tensor is not None]
    results = []
    for function in (native_mix, by_operators):
        out = function(*inputs, runs, sizes)
        upstream = torch.arange(out.numel()).view_as(out).cos()
        results.append([out, *torch.autograd.grad((out * upstream).sum(), wanted)])
    for found, expected in zip(*results, strict=True):
        scale = float(expected.detach().abs().max().clamp(min=1))
        torch.testing.assert_close(found, expected, atol=3e-5 * scale, rtol=1e-3)


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    children=st.lists(st.tuples(st.integers(0, 4), st.integers(1, 20)), max_size=4),
    shape=st.sampled_from([(4, 16, 1, 16), (4, 16, 2, 16), (6, 20, 3, 7), (2, 33, 1, 32), (2, 24, 2, 64)]),
    kernel=st.sampled_from([2, 4]),
    bias=st.booleans(),
    padding=st.integers(0, 2),
    limit=st.sampled_from([(0.0, math.inf), (0.3, 1.5)]),
)
def test_equals_operators_of_torch(lengths, children, shape, kernel, bias, padding, limit):
    children = sorted((parent % len(lengths), length) for parent, length in children)
    runs = Runs([*lengths, *(length for _, length in children)], [p for p, _ in children], padding=padding)
    compare(runs, Sizes(*shape, limit, 1e-5), kernel, bias)


def test_a_long_row_keeps_few_states():
    compare(Runs([700, 5, 90], [0, 0]), Sizes(2, 16, 1, 128, (0.0, math.inf), 1e-5))


def test_threads_change_no_bit():
    runs, sizes = Runs([40, 33, 7, 21, 30, 2], [0, 0, 2]), Sizes(4, 16, 2, 16, (0.0, math.inf), 1e-5)
    inputs = tensors(runs.tokens, sizes, 4, bias=True)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            out = native_mix(*inputs, runs, sizes)
            results.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


def test_its_gradient_keeps_nothing_but_its_inputs():
    runs, sizes = Runs([60]), Sizes(4, 16, 1, 16, (0.0, math.inf), 1e-5)
    inputs = tensors(60, sizes, 4, bias=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.data_ptr()) or t, lambda t: t):
        native_mix(*inputs, runs, sizes)
    assert set(kept) == {tensor.data_ptr() for tensor in inputs}
