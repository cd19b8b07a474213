"""What only runs on CUDA, checked here as far as a CPU can: Triton's interpreter, and FlashAttention's formulas."""

import subprocess
import sys
from pathlib import Path

import pytest

KERNELS = """
import torch
from nemotron_steps.engine.kernels import fused
from nemotron_steps.engine.kernels import triton_kernels

generator = torch.Generator().manual_seed(0)

def random(*shape):
    return torch.randn(*shape, generator=generator)

gate_up, grad = random(5, 2 * 37), random(5, 37)
leaf = gate_up.clone().requires_grad_()
expected = fused.swiglu(leaf)
expected.backward(grad)
torch.testing.assert_close(triton_kernels.swiglu_forward(gate_up), expected.detach())
torch.testing.assert_close(triton_kernels.swiglu_backward(gate_up, grad), leaf.grad)

states, grad = random(61, 37), random(61, 37)
leaf = states.clone().requires_grad_()
expected = fused.squared_relu(leaf)
expected.backward(grad)
assert torch.equal(triton_kernels.squared_relu_forward(states), expected.detach())
assert torch.equal(triton_kernels.squared_relu_backward(states, grad), leaf.grad)

tokens, groups, heads, width = 41, 2, 3, 16
angles = random(tokens, 1, 1, width // 2).repeat(1, 1, 1, 2)
cos_sin = torch.stack((angles.cos(), angles.sin()))
grads = random(tokens, groups * heads, width), random(tokens, groups, width), random(tokens, groups, width)
for norm in (True, False):
    results = []
    mixed, scale = random(tokens, groups, heads + 2, width), random(heads + 1, width)
    for split in (fused.split_heads, triton_kernels.split_heads):
        leaves = [mixed.clone().requires_grad_(), scale.clone().requires_grad_() if norm else None]
        parts = split(*leaves, cos_sin, 1e-6)
        torch.autograd.backward(parts, grads)
        results.append([*(part.detach() for part in parts), *(leaf.grad for leaf in leaves if leaf is not None)])
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)

logits, targets = 20 * random(9, 5000), torch.randint(0, 5000, (9,), generator=generator)
largest, total, chosen = triton_kernels.softmax_statistics(logits, targets)
torch.testing.assert_close(total.log() + largest, logits.logsumexp(-1))
assert torch.equal(chosen, logits.gather(1, targets[:, None]).squeeze(1))
targets[3] = -1  # another rank's
expected = torch.nn.functional.one_hot(targets.clamp(min=0), 5000) - logits.softmax(-1)
expected[3] = -logits[3].softmax(-1)
found = triton_kernels.to_residuals(logits.clone(), largest, total.log(), targets)
torch.testing.assert_close(found, expected)
sure = torch.zeros(2, 5000, dtype=torch.float16)
sure[:, 7] = 20.0  # p = 1 - 1e-5, which 16 bits round to 1
largest, total, _ = triton_kernels.softmax_statistics(sure, torch.tensor([7, 7]))
residuals = triton_kernels.to_residuals(sure.clone(), largest, total.log(), torch.tensor([7, 7]))
left = 1 - sure[0].double().softmax(-1)[7]
torch.testing.assert_close(residuals[:, 7].double(), left.expand(2), atol=0, rtol=0.01)
"""


ATTENTION = """
import sys, torch
from nemotron_steps.engine.policy import layers as attention
from nemotron_steps.engine.kernels import triton_attention as kernels
from nemotron_steps.engine.policy.token_layout import build_layout
from tests.engine.policy.batches import grouped_batch

kernels.FORWARD = kernels.FOR_QUERIES = kernels.Tile(16, 8, 4, 1)
kernels.FOR_KEYS = kernels.Tile(8, 16, 4, 1)
assert attention._works(torch.device("cpu"), torch.float32, 4, 2, 16)
for prompts, width, divisible_by, heads, seed, apart in (
    (((20, 3), (9, 2), (40, 1), (1, 2)), 48, 1, (6, 2), 0, 0),
    (((16, 4), (3, 4)), 40, 8, (2, 2), 1, 0),
    (((30, 1), (20, 1), (17, 1), (1, 1)), 33, 1, (3, 1), 2, 0),
    (((9, 2), (5, 2)), 20, 1, (1, 1), 3, 7),  # scores so low that a key that is not there has infinite weight
):
    batch = grouped_batch(seed, prompts, width)
    layout = build_layout(batch, range(len(batch)), divisible_by=divisible_by)
    tokens, generator = len(layout.token_ids), torch.Generator().manual_seed(seed)
    shapes = (heads[0], 16), (heads[1], 16), (heads[1], 16), (heads[0] * 16,)
    *tensors, grad = (torch.randn(tokens, *shape, generator=generator) for shape in shapes)
    tensors[0] -= apart
    tensors[1] += apart
    grad[tokens - layout.padding :] = 0
    results = []
    for attend in (attention.flat_attention, lambda *given: attention.packed_attention(*given).flatten(1)):
        leaves = [tensor.clone().requires_grad_() for tensor in tensors]
        out = attend(*leaves, layout)
        out.backward(grad)
        results.append([out.detach(), *(leaf.grad for leaf in leaves)])
    for expected, found in zip(*results, strict=True):
        assert (found - expected).norm() <= (1e-4 if apart else 2e-6) * expected.norm()
"""


@pytest.mark.parametrize("program", [KERNELS, ATTENTION], ids=["elementwise", "attention"])
def test_triton_kernels_equal_the_plain_ones_in_the_interpreter(program):
    pytest.importorskip("triton")
    result = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(__file__).parents[3],
        env={"TRITON_INTERPRET": "1", "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == 0, result.stderr
