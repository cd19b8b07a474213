"""Products of linear layers against float64, whichever library computes them."""

import pytest
import torch

from nemotron_steps.engine.kernels.fused import linear, linear_forward, outer_product
from tests.conditioning import assert_conditioned, in_float64, with_gradients


@pytest.mark.parametrize("rows", [0, 5, 300])
@pytest.mark.parametrize("bias", [True, False])
def test_linear_and_its_gradients(rows, bias):
    torch.manual_seed(0)
    leaves = [torch.randn(rows, 1, 24), torch.randn(40, 24), torch.randn(40)][: 3 if bias else 2]
    given = [torch.randn(rows, 1, 40), *leaves]
    assert_conditioned(with_gradients(linear, *given), in_float64(torch.nn.functional.linear), *given)


@pytest.mark.parametrize(("left", "right"), [(24, 40), (40, 24)])
def test_products_of_strided_operands(left, right):
    torch.manual_seed(0)
    a, b = torch.randn(100, left), torch.randn(100, right)
    assert_conditioned(outer_product(a, b), lambda a, b: a.double().t() @ b.double(), a, b)
    weight = torch.randn(left, 7)
    assert_conditioned(linear_forward(a, weight.t()), lambda a, weight: a.double() @ weight.double(), a, weight)


def test_other_types_are_torchs_and_only_what_is_asked_for_gets_a_gradient():
    states, weight = torch.randn(4, 8).bfloat16(), torch.randn(3, 8).bfloat16()
    assert torch.equal(linear(states, weight), torch.nn.functional.linear(states, weight))
    states, weight = torch.randn(4, 8), torch.randn(3, 8, requires_grad=True)
    linear(states, weight).sum().backward()
    assert states.grad is None
    torch.testing.assert_close(weight.grad, states.sum(0).expand(3, 8))


@pytest.mark.cuda
@pytest.mark.parametrize("biased", [False, True])
def test_on_cuda_a_weights_gradient_adds_up_in_float32_without_rounding_each_micro_batch(biased):
    generator = torch.Generator("cuda").manual_seed(0)

    def random(*shape):
        return torch.randn(shape, device="cuda", generator=generator).bfloat16()

    weight = torch.nn.Parameter(random(24, 16))
    bias = torch.nn.Parameter(random(24)) if biased else None
    weight.main_grad = torch.zeros(24, 16, device="cuda")
    exact = torch.zeros(24, 16, device="cuda", dtype=torch.float64)
    for _ in range(3):
        states, grad = random(5, 2, 16).requires_grad_(), random(5, 2, 24)
        linear(states, weight, bias).backward(grad)
        exact += grad.flatten(0, 1).double().t() @ states.detach().flatten(0, 1).double()
        torch.testing.assert_close(states.grad, grad @ weight.detach())
    assert weight.grad is None and (bias is None or bias.grad is not None)
    torch.testing.assert_close(weight.main_grad.double(), exact, atol=1e-4, rtol=1e-5)
