"""Products of linear layers against float64, whichever library computes them."""

from __future__ import annotations

import pytest
import torch

from nemotron_steps.engine.policy.kernels.dense import linear, linear_forward, outer_product


def exact(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().double().requires_grad_(tensor.requires_grad)


@pytest.mark.parametrize("rows", [0, 1, 5, 300])
@pytest.mark.parametrize("bias", [True, False])
def test_linear_and_its_gradients(rows, bias):
    torch.manual_seed(0)
    leaves = [torch.randn(rows, 1, 24), torch.randn(40, 24), torch.randn(40)][: 3 if bias else 2]
    grad = torch.randn(rows, 1, 40)
    mine = [leaf.clone().requires_grad_() for leaf in leaves]
    theirs = [exact(leaf).requires_grad_() for leaf in leaves]
    out, expected = linear(*mine), torch.nn.functional.linear(*theirs)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
    out.backward(grad)
    expected.backward(grad.double())
    for found, wanted in zip(mine, theirs, strict=True):
        torch.testing.assert_close(found.grad.double(), wanted.grad, atol=1e-4, rtol=1e-5)


def test_only_what_is_asked_for_gets_a_gradient():
    states, weight = torch.randn(4, 8), torch.randn(3, 8, requires_grad=True)
    linear(states, weight).sum().backward()
    assert states.grad is None
    torch.testing.assert_close(weight.grad, states.sum(0).expand(3, 8))


@pytest.mark.parametrize(("left", "right"), [(24, 40), (40, 24)])
def test_products_of_strided_operands(left, right):
    torch.manual_seed(0)
    a, b = torch.randn(100, left), torch.randn(100, right)
    torch.testing.assert_close(outer_product(a, b).double(), a.double().t() @ b.double(), atol=1e-5, rtol=1e-5)
    weight = torch.randn(left, 7)
    torch.testing.assert_close(
        linear_forward(a, weight.t()).double(), a.double() @ weight.double(), atol=1e-5, rtol=1e-5
    )


def test_other_types_are_torchs():
    states, weight = torch.randn(4, 8).bfloat16(), torch.randn(3, 8).bfloat16()
    assert torch.equal(linear(states, weight), torch.nn.functional.linear(states, weight))
