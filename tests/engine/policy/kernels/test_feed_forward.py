"""The layer's second half as one function against the same formula under autograd in float64."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from nemotron_steps.engine.kernels import cpu_layers as cpu_norm_swiglu
from nemotron_steps.engine.kernels.cpu_layers import feed_forward
from tests.conditioning import assert_conditioned, in_float64, with_gradients


def reference(hidden, norm, up, down, eps):
    gate, linear = F.linear(F.rms_norm(hidden, norm.shape, norm, eps), up).chunk(2, dim=-1)
    return hidden + F.linear(F.silu(gate) * linear, down)


def test_value_and_every_gradient():
    assert_near_float64(hidden=24, ffn=40)


def test_without_a_compiler_it_does_the_same_by_torch(monkeypatch):
    monkeypatch.setattr(cpu_norm_swiglu, "library", lambda: None)
    assert_near_float64(hidden=24, ffn=40)


@pytest.mark.compiler
@pytest.mark.usefixtures("kernels_for")
@pytest.mark.parametrize(("hidden", "ffn"), [(3, 5), (24, 40), (20, 33)])
def test_it_does_with_vectors_of_any_width(hidden, ffn):
    assert_near_float64(hidden, ffn)


def assert_near_float64(hidden, ffn):
    torch.manual_seed(0)
    shapes = ((70, 1, hidden), (hidden,), (2 * ffn, hidden), (hidden, ffn))
    leaves = [torch.randn(shape) for shape in shapes]
    given = [torch.randn(shapes[0]), *leaves]
    found = with_gradients(partial(feed_forward, eps=1e-6), *given)
    assert_conditioned(found, in_float64(partial(reference, eps=1e-6)), *given)


def test_states_and_a_gradient_that_do_not_lie_row_by_row():
    hidden, grad = torch.randn(24, 1, 70).transpose(0, 2), torch.ones(()).expand(70, 1, 24)
    weights = [torch.randn(24), torch.randn(2 * 40, 24), torch.randn(24, 40)]
    results = []
    for order in (torch.Tensor.clone, torch.Tensor.contiguous):
        leaf = order(hidden).requires_grad_()
        out = feed_forward(leaf, *weights, 1e-6)
        out.backward(grad if order is torch.Tensor.clone else grad.contiguous())
        results.append((out.detach(), leaf.grad))
    assert not hidden.is_contiguous()
    for scattered, rows in zip(*results, strict=True):
        torch.testing.assert_close(scattered, rows)
