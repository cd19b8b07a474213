"""Which kernels attend: our own where they work, else torch's; a part of the queries alone."""

import pytest
import torch

from nemotron_steps.engine.policy import layers as attention
from nemotron_steps.engine.policy.layers import flat_attention, part_attention
from nemotron_steps.engine.policy.token_layout import build_layout, to_device
from tests.engine.policy.attention import attention_on_gpu
from tests.engine.policy.batches import grouped_batch

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def untried():
    """As a process that has not asked for any kernels, before and after."""
    works = attention._works
    works.cache_clear()
    yield
    works.cache_clear()


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("heads", attention_on_gpu.HEADS, ids=str)
@pytest.mark.parametrize("name", attention_on_gpu.LAYOUTS)
def test_on_cuda_all_kernels_are_as_near_to_float32_as_flash_attention(name, heads, dtype):
    layout = attention_on_gpu.layout_of(name)
    query, key, *_ = attention_on_gpu.tensors_of(layout, heads, dtype)
    assert attention.packed_takes(query, key)
    assert not attention_on_gpu.wrong(attention_on_gpu.errors(layout, heads, dtype))


def test_where_our_kernels_cannot_be_compiled_it_is_said_once(caplog):
    for _ in range(2):  # on CPU Triton has no driver
        assert not attention._works(CPU, torch.bfloat16, 4, 2, 64)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "4 heads of 64 (2 of keys)" in caplog.text


@pytest.mark.parametrize("wrong", ["forward", "backward", None])
def test_kernels_that_compute_something_else_are_left_alone(wrong, monkeypatch, caplog):
    kernels = pytest.importorskip("nemotron_steps.engine.kernels.triton_attention")

    def forward(query, key, value, rows, longest, out):
        right = torch.tensor([0, 0.5, 1, 5 / 3]).view(4, 1, 1)
        out.copy_((right if wrong != "forward" else right + 0.3).expand_as(out))

    def backward(grad, query, key, value, out, lse, rows, longest, grads):
        shares = torch.tensor([2 / 3, 0, 2 / 3, 2 / 3 if wrong != "backward" else 0.3])
        grads[2].copy_(shares.view(4, 1, 1).expand_as(grads[2]))

    monkeypatch.setattr(kernels, "attention_forward", forward)
    monkeypatch.setattr(kernels, "attention_backward", backward)
    assert attention._works(CPU, torch.float32, 4, 2, 64) is (wrong is None)
    assert ("a wrong result" in caplog.text) is (wrong is not None)


def test_a_want_of_memory_says_nothing_of_the_kernels(monkeypatch):
    def forward(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    kernels = pytest.importorskip("nemotron_steps.engine.kernels.triton_attention")
    monkeypatch.setattr(kernels, "attention_forward", forward)
    with pytest.raises(torch.OutOfMemoryError):
        attention._works(CPU, torch.float32, 4, 2, 64)


def test_other_sizes_of_heads_are_not_taken(monkeypatch):
    monkeypatch.setattr(attention, "_works", lambda *_: True)

    class OnCuda:
        is_cuda, device, dtype = True, torch.device("cuda"), torch.bfloat16

        def __init__(self, width):
            self.shape = (10, 4, width)

    assert attention.packed_takes(OnCuda(128), OnCuda(128))
    assert not attention.packed_takes(OnCuda(80), OnCuda(80))


# ----------------------------------------------------------------------------------------------- a part of the queries

WIDTH = 16
KINDS = {"cpu": (torch.float32, 5e-6, 0.0), "cuda": (torch.bfloat16, 0.05, 0.02)}
"""Where, in what, and how near to whole attention there."""


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("kept", [(0, 3, 4, 7), (1, 2, 5, 6), (0,), (7,)], ids=str)
@pytest.mark.parametrize("share_prompts", [True, False])
def test_a_part_of_the_queries_attends_as_among_all_queries(share_prompts, kept, device):
    dtype, atol, rtol = KINDS[device]
    batch = grouped_batch()
    layout = build_layout(batch, range(len(batch)), share_prompts=share_prompts, divisible_by=8)
    layout = to_device(layout, torch.device(device))
    tokens = len(layout.token_ids)
    each = tokens // 8
    ranges = tuple((number * each, (number + 1) * each) for number in kept)
    mine = torch.cat([torch.arange(*own) for own in ranges])
    generator = torch.Generator().manual_seed(0)
    shapes = (6, WIDTH), (2, WIDTH), (2, WIDTH), (6 * WIDTH,)
    made = [torch.randn(tokens, *shape, generator=generator).to(device, dtype) for shape in shapes]
    states, upstream = [tensor.requires_grad_() for tensor in made[:3]], torch.zeros_like(made[3])
    mine = mine[mine < tokens - layout.padding].to(device)
    upstream[mine] = made[3][mine]

    whole = flat_attention(*states, layout)
    expected = torch.autograd.grad(whole, states, upstream)
    query, key, value = states
    asking = torch.cat([query[first:after] for first, after in ranges])
    part = part_attention(asking, key, value, layout.part(ranges))
    torch.testing.assert_close(part[: len(mine)], whole[mine], atol=atol, rtol=rtol)
    given = torch.cat([upstream[first:after] for first, after in ranges])
    for gradient, theirs in zip(torch.autograd.grad(part, states, given), expected, strict=True):
        torch.testing.assert_close(gradient, theirs, atol=atol, rtol=rtol)


def test_a_rank_with_nothing_but_padding_takes_part_in_the_backward_pass():
    """Else the ranks that exchange gradients with it would wait for ever."""
    layout = build_layout(grouped_batch(), [7, 8], divisible_by=64)
    tokens = len(layout.token_ids)
    assert layout.padding > 2
    sizes = ((2, 4), (tokens, 1), (tokens, 1))
    states = [torch.randn(count, heads, WIDTH, requires_grad=True) for count, heads in sizes]
    out = part_attention(*states, layout.part(((tokens - 2, tokens),)))
    assert out.isfinite().all()
    gradients = torch.autograd.grad(out, states, torch.zeros_like(out))
    assert not any(gradient.any() for gradient in gradients)
