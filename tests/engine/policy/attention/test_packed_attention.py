"""Our own attention kernels: as masked attention in Triton's interpreter, used where they run and left where not."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from nemotron_steps.engine.policy.attention import flash, te_attention
from nemotron_steps.engine.policy.attention import flash as packed_attention
from nemotron_steps.engine.policy.token_layout import build_layout
from tests.engine.policy.attention import attention_on_gpu
from tests.engine.policy.batches import grouped_batch

CASES = """
import sys, torch
from nemotron_steps.engine.policy.attention import flash as packed_attention
from nemotron_steps.engine.policy.attention.attention import flat_attention
from nemotron_steps.engine.kernels import triton_attention as kernels
from nemotron_steps.engine.policy.token_layout import build_layout
from tests.engine.policy.batches import grouped_batch

kernels.FORWARD = kernels.FOR_QUERIES = kernels.Tile(16, 8, 4, 1)
kernels.FOR_KEYS = kernels.Tile(8, 16, 4, 1)
assert packed_attention._works(torch.device("cpu"), torch.float32, 4, 2, 16)
for prompts, width, divisible_by, heads, seed, apart in (
    (((20, 3), (9, 2), (5, 1), (40, 1), (1, 2)), 60, 1, (6, 2), 0, 0),
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
    for attend in (flat_attention, lambda *given: packed_attention.packed_attention(*given).flatten(1)):
        leaves = [tensor.clone().requires_grad_() for tensor in tensors]
        out = attend(*leaves, layout)
        out.backward(grad)
        results.append([out.detach(), *(leaf.grad for leaf in leaves)])
    for expected, found in zip(*results, strict=True):
        assert (found - expected).norm() <= (1e-4 if apart else 2e-6) * expected.norm()
"""


def test_outputs_and_gradients_are_those_of_masked_attention():
    pytest.importorskip("triton")
    result = subprocess.run(
        [sys.executable, "-c", CASES],
        cwd=Path(__file__).parents[4],
        env={"TRITON_INTERPRET": "1", "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("prompts", [((20, 3), (5, 1), (9, 2)), ((7, 1), (3, 3)), ((4, 4),)])
def test_each_row_knows_its_prompt_and_its_followers(prompts):
    batch = grouped_batch(prompts=prompts, width=30)
    spans = build_layout(batch, range(len(batch)), divisible_by=4).spans
    bounds = [0, *spans.lengths.cumsum(0).tolist()]
    counts = spans.first_suffix.diff().tolist()
    own = [[start, end - start] for start, end in pairwise(bounds)]
    expected, suffix = [], len(counts)
    for whole, followers in zip(own, counts, strict=False):
        expected.append([*whole, 0, 0, bounds[suffix], bounds[suffix + followers]])
        suffix += followers
    parents = [own[number] for number, followers in enumerate(counts) for _ in range(followers)]
    expected += [[*row, *parent, 0, 0] for row, parent in zip(own[len(counts) :], parents, strict=True)]
    assert spans.rows.tolist() == expected
    assert spans.rows.dtype is torch.int32


@pytest.fixture
def untried():
    packed_attention._works.cache_clear()
    yield
    packed_attention._works.cache_clear()


def test_where_the_kernels_cannot_be_compiled_it_is_said_once(untried, caplog):
    for _ in range(2):  # on CPU Triton has no driver
        assert not packed_attention._works(torch.device("cpu"), torch.bfloat16, 4, 2, 64)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "4 heads of 64 (2 of keys)" in caplog.text


@pytest.mark.parametrize("wrong", ["forward", "backward"])
def test_kernels_that_compute_something_else_are_left_alone(wrong, untried, monkeypatch, caplog):
    kernels = pytest.importorskip("nemotron_steps.engine.kernels.triton_attention")

    def forward(query, key, value, rows, longest, out):
        right = torch.tensor([0, 0.5, 1, 5 / 3]).view(4, 1, 1)
        out.copy_((right if wrong != "forward" else right + 0.3).expand_as(out))

    def backward(grad, query, key, value, out, lse, rows, longest, grads):
        shares = torch.tensor([2 / 3, 0, 2 / 3, 2 / 3 if wrong != "backward" else 0.3])
        grads[2].copy_(shares.view(4, 1, 1).expand_as(grads[2]))

    monkeypatch.setattr(kernels, "attention_forward", forward)
    monkeypatch.setattr(kernels, "attention_backward", backward)
    assert not packed_attention._works(torch.device("cpu"), torch.float32, 4, 2, 64)
    assert "a wrong result" in caplog.text
    packed_attention._works.cache_clear()
    wrong = ""
    assert packed_attention._works(torch.device("cpu"), torch.float32, 4, 2, 64)


@pytest.mark.parametrize(
    ("length", "runs_here", "cudnn", "by"),
    [
        (300, True, True, "packed"),
        (2100, True, True, "merged"),
        (2100, True, False, "packed"),
        (300, False, True, "merged"),
    ],
)
def test_long_rows_are_left_to_cudnn_where_it_is_there(length, runs_here, cudnn, by, monkeypatch):
    layout = attention_on_gpu.timing_layout(1, 2, 4, length)
    states = torch.zeros(len(layout.token_ids), 2, 8)
    monkeypatch.setattr(packed_attention, "packed_takes", lambda *_: runs_here)
    monkeypatch.setattr(te_attention, "takes", lambda *_: cudnn)
    called = []
    monkeypatch.setattr(packed_attention, "packed_attention", lambda *_: called.append("packed") or states)
    monkeypatch.setattr(flash._FlatFlash, "apply", lambda *_: called.append("merged") or states)
    flash.flat_flash_attention(states, states, states, layout)
    assert called == [by]


def test_other_sizes_of_heads_are_not_taken(monkeypatch):
    monkeypatch.setattr(packed_attention, "_works", lambda *_: True)

    class OnCuda:
        is_cuda, device, dtype = True, torch.device("cuda"), torch.bfloat16

        def __init__(self, width: int) -> None:
            self.shape = (10, 4, width)

    assert packed_attention.packed_takes(OnCuda(128), OnCuda(128))
    assert not packed_attention.packed_takes(OnCuda(80), OnCuda(80))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("heads", attention_on_gpu.HEADS, ids=str)
@pytest.mark.parametrize("name", attention_on_gpu.LAYOUTS)
def test_on_cuda_they_are_used_and_as_near_to_float32_as_flash_attention(name, heads, dtype):
    layout = attention_on_gpu.layout_of(name)
    query, key, *_ = attention_on_gpu.tensors_of(layout, heads, dtype)
    assert packed_attention.packed_takes(query, key)
    assert not attention_on_gpu.wrong(attention_on_gpu.errors(layout, heads, dtype))
