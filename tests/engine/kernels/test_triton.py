"""What only runs on CUDA, checked here as far as a CPU can: Triton's interpreter, and FlashAttention's formulas."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nemotron_steps.engine.policy.attention import flash
from nemotron_steps.engine.policy.attention.attention import flat_attention
from nemotron_steps.engine.policy.token_layout import build_layout
from tests.engine.policy.batches import grouped_batch

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

states, added, weight = random(2100, 24), random(2100, 24), random(24)
grads = random(2100, 24), random(2100, 24)
leaves = [tensor.clone().requires_grad_() for tensor in (states, added, weight)]
total, normed = fused.add_rms_norm(*leaves, 1e-6)
torch.autograd.backward((total, normed), grads)
found = triton_kernels.add_rms_norm_forward(states, added, weight, 1e-6)
torch.testing.assert_close(found[:2], (total.detach(), normed.detach()))
grad, grad_weight = triton_kernels.add_rms_norm_backward(found[0], weight, found[2], *grads)
torch.testing.assert_close(grad, leaves[0].grad, atol=1e-5, rtol=1e-5)
torch.testing.assert_close(grad, leaves[1].grad, atol=1e-5, rtol=1e-5)
torch.testing.assert_close(grad_weight, leaves[2].grad, atol=1e-4, rtol=1e-4)

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
from nemotron_steps.engine.policy.attention import flash as flash
from nemotron_steps.engine.policy.attention.attention import flat_attention
from nemotron_steps.engine.kernels import triton_attention as kernels
from nemotron_steps.engine.policy.token_layout import build_layout
from tests.engine.policy.batches import grouped_batch

kernels.FORWARD = kernels.FOR_QUERIES = kernels.Tile(16, 8, 4, 1)
kernels.FOR_KEYS = kernels.Tile(8, 16, 4, 1)
assert flash._works(torch.device("cpu"), torch.float32, 4, 2, 16)
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
    for attend in (flat_attention, lambda *given: flash.packed_attention(*given).flatten(1)):
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


def _scores(query, key, rows, columns, causal):
    """Scaled scores [heads, tokens, keys], -inf outside each run's own keys."""
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * query.shape[-1] ** -0.5
    allowed = torch.zeros(scores.shape[1:], dtype=torch.bool)
    spans = zip(rows.cu_seqlens[:-1], rows.cu_seqlens[1:], columns.cu_seqlens[:-1], columns.cu_seqlens[1:], strict=True)
    for start, end, first, last in spans:
        block = torch.ones(int(end - start), int(last - first), dtype=torch.bool)
        allowed[start:end, first:last] = block.tril() if causal else block
    return scores.masked_fill(~allowed, float("-inf"))


def _plain_forward(query, key, value, rows, columns, *, causal):
    scores = _scores(query, key, rows, columns, causal)
    value = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
    lse = scores.logsumexp(-1)
    return torch.einsum("hqk,khd->qhd", (scores - lse[..., None]).exp(), value), lse, torch.empty(0)


def _plain_backward(grad, query, key, value, out, lse, rows, columns, rng, *, causal):
    """FlashAttention 2's backward pass (arXiv 2307.08691, algorithm 2) without the tiles."""
    ratio, scale = query.shape[1] // key.shape[1], query.shape[-1] ** -0.5
    probabilities = (_scores(query, key, rows, columns, causal) - lse[..., None]).exp()
    wide_key, wide_value = (t.repeat_interleave(ratio, dim=1) for t in (key, value))
    grad_value = torch.einsum("hqk,qhd->khd", probabilities, grad)
    along = (grad * out).sum(-1).t()[..., None]
    grad_scores = probabilities * (torch.einsum("qhd,khd->hqk", grad, wide_value) - along) * scale
    grad_query = torch.einsum("hqk,khd->qhd", grad_scores, wide_key)
    grad_key = torch.einsum("hqk,qhd->khd", grad_scores, query)
    return grad_query, *(t.unflatten(1, (-1, ratio)).sum(2) for t in (grad_key, grad_value))


@pytest.mark.parametrize("divisible_by", [1, 8])
@pytest.mark.parametrize("prompts", [((6, 3), (9, 2), (4, 1)), ((5, 4), (8, 4)), ((7, 1), (3, 1))])
def test_merged_flash_attention_equals_masked_attention(prompts, divisible_by, monkeypatch):
    monkeypatch.setattr(flash, "_forward", _plain_forward)
    monkeypatch.setattr(flash, "_backward", _plain_backward)
    rows = max(4, sum(count for _, count in prompts))
    batch = grouped_batch(prompts=(*prompts, (2, rows - sum(c for _, c in prompts) + 1)), width=20)
    layout = build_layout(batch, range(len(batch)), divisible_by=divisible_by)
    generator = torch.Generator().manual_seed(1)
    tensors = [torch.randn(len(layout.token_ids), heads, 8, generator=generator) for heads in (4, 2, 2)]
    grad = torch.randn(len(layout.token_ids), 32, generator=generator)
    results = []
    for attend in (flat_attention, flash.flat_flash_attention):
        leaves = [tensor.clone().requires_grad_() for tensor in tensors]
        out = attend(*leaves, layout)
        if layout.padding:
            grad[-layout.padding :] = 0
        out.backward(grad)
        results.append([out.detach(), *(leaf.grad for leaf in leaves)])
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)
