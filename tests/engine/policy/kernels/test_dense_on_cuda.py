"""Linear layers on a GPU: gradients that go straight into float32."""

from __future__ import annotations

import pytest
import torch

from nemotron_steps.engine.kernels.linear import linear

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("biased", [False, True])
def test_a_weights_gradient_adds_up_in_float32_without_rounding_each_micro_batch(biased: bool) -> None:
    generator = torch.Generator("cuda").manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", generator=generator).bfloat16()

    weight = torch.nn.Parameter(random(24, 16))
    bias = torch.nn.Parameter(random(24)) if biased else None
    weight.main_grad = torch.zeros(24, 16, device="cuda")  # type: ignore[attr-defined]
    exact = torch.zeros(24, 16, device="cuda", dtype=torch.float64)
    for _ in range(3):
        states, grad = random(5, 2, 16).requires_grad_(), random(5, 2, 24)
        out = linear(states, weight, bias)
        out.backward(grad)
        exact += grad.flatten(0, 1).double().t() @ states.detach().flatten(0, 1).double()
        torch.testing.assert_close(states.grad, grad @ weight.detach())
    assert weight.grad is None
    torch.testing.assert_close(weight.main_grad.double(), exact, atol=1e-4, rtol=1e-5)
    if bias is not None:
        assert bias.grad is not None
