"""Which kernels attend: our own and Transformer Engine's where they work, else torch's; a part of the queries alone."""

from __future__ import annotations

import inspect
import sys
from itertools import pairwise

import pytest
import torch

from nemotron_steps.engine.kernels.varlen import Spans, to_device
from nemotron_steps.engine.policy.attention import flash, te_attention
from nemotron_steps.engine.policy.attention.attention import flat_attention
from nemotron_steps.engine.policy.attention.few_heads import part_attention
from nemotron_steps.engine.policy.token_layout import build_layout
from tests.engine.policy.attention import attention_on_gpu
from tests.engine.policy.batches import grouped_batch

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def untried():
    """As a process that has not asked for any kernels, before and after."""
    cached = flash._works, te_attention.load, te_attention._works
    for function in cached:
        function.cache_clear()
    yield
    for function in cached:
        function.cache_clear()


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("heads", attention_on_gpu.HEADS, ids=str)
@pytest.mark.parametrize("name", attention_on_gpu.LAYOUTS)
def test_on_cuda_all_kernels_are_as_near_to_float32_as_flash_attention(name, heads, dtype):
    layout = attention_on_gpu.layout_of(name)
    query, key, *_ = attention_on_gpu.tensors_of(layout, heads, dtype)
    assert flash.packed_takes(query, key)
    assert not attention_on_gpu.wrong(attention_on_gpu.errors(layout, heads, dtype))


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


def test_where_our_kernels_cannot_be_compiled_it_is_said_once(caplog):
    for _ in range(2):  # on CPU Triton has no driver
        assert not flash._works(CPU, torch.bfloat16, 4, 2, 64)
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
    assert flash._works(CPU, torch.float32, 4, 2, 64) is (wrong is None)
    assert ("a wrong result" in caplog.text) is (wrong is not None)


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
    monkeypatch.setattr(flash, "packed_takes", lambda *_: runs_here)
    monkeypatch.setattr(te_attention, "takes", lambda *_: cudnn)
    called = []
    monkeypatch.setattr(flash, "packed_attention", lambda *_: called.append("packed") or states)
    monkeypatch.setattr(flash._FlatFlash, "apply", lambda *_: called.append("merged") or states)
    flash.flat_flash_attention(states, states, states, layout)
    assert called == [by]


def test_other_sizes_of_heads_are_not_taken(monkeypatch):
    monkeypatch.setattr(flash, "_works", lambda *_: True)

    class OnCuda:
        is_cuda, device, dtype = True, torch.device("cuda"), torch.bfloat16

        def __init__(self, width):
            self.shape = (10, 4, width)

    assert flash.packed_takes(OnCuda(128), OnCuda(128))
    assert not flash.packed_takes(OnCuda(80), OnCuda(80))


# ----------------------------------------------------------------------------------------------- Transformer Engine


def stand_in(mask_argument):
    """What is called of a Transformer Engine, on CPU; the mask's kind is an argument of this name."""

    def forward(q, k, v, cu_seqlens_q, **arguments):
        run = torch.bucketize(torch.arange(len(q)), cu_seqlens_q[1:], right=True)
        seen = run[:, None] == run
        if arguments.get(mask_argument, "padding") == "padding_causal":
            seen = seen.tril()
        k, v = (states.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for states in (k, v))
        scores = torch.einsum("thd,shd->hts", q, k).masked_fill(~seen, -torch.inf)
        return torch.einsum("hts,shd->thd", scores.softmax(-1), v), (scores.logsumexp(-1).t()[..., None], None)

    parameters = [*inspect.signature(forward).parameters.values()][:4]
    named = inspect.Parameter(mask_argument, inspect.Parameter.KEYWORD_ONLY)
    forward.__signature__ = inspect.Signature([*parameters, named])
    return te_attention.Library(forward, lambda q, k, v: (q, k, v), None, {torch.float32: None})


@pytest.mark.parametrize(("mask_argument", "works"), [("attn_mask_type", True), ("mask", False)])
def test_a_version_whose_arguments_have_other_names_is_left_alone(mask_argument, works, monkeypatch, caplog):
    with monkeypatch.context() as patched:
        patched.setattr(te_attention, "load", lambda: stand_in(mask_argument))
        assert te_attention._works(CPU, torch.float32, 4, 16, 2) is works
    assert ("calls its arguments otherwise" in caplog.text) is not works


def test_queries_and_keys_have_their_own_runs_and_gradients_the_statistics_as_they_came(monkeypatch):
    given = {}

    def noted(
        max_seqlen_q, max_seqlen_kv, cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded, q, k, v,
        attn_mask_type, o=None, d_o=None, aux_ctx_tensors=(),
    ):  # fmt: skip
        given.update(locals())
        return (q, k, v) if aux_ctx_tensors else (q, (torch.arange(12.0).view(6, 2, 1), "rng"))

    with monkeypatch.context() as patched:
        library = te_attention.Library(noted, noted, "backend", {torch.float32: None})
        patched.setattr(te_attention, "load", lambda: library)
        rows, columns = Spans(torch.tensor([0, 2, 6]), 70), Spans(torch.tensor([0, 1, 3]), 300)
        query, key, value, grad = (torch.randn(length, 2, 4) for length in (6, 3, 3, 6))
        out, lse, rng = te_attention.forward(query, key, value, rows, columns, causal=False)
        assert torch.equal(lse, torch.arange(12.0).view(6, 2).t()) and rng == "rng"
        found = te_attention.backward(grad, query, key, value, out, lse, rows, columns, rng, causal=True)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, (query, key, value), strict=True))
    assert (given["max_seqlen_q"], given["max_seqlen_kv"]) == (128, 512)
    for name, spans in (("q", rows), ("kv", columns)):
        assert given[f"cu_seqlens_{name}"] is given[f"cu_seqlens_{name}_padded"] is spans.cu_seqlens
    assert given["attn_mask_type"] == "padding_causal"
    assert torch.equal(given["o"], query) and torch.equal(given["d_o"], grad)
    assert torch.equal(given["aux_ctx_tensors"][0], torch.arange(12.0).view(6, 2, 1))


@pytest.mark.parametrize("error", ["ImportError('undefined symbol')", "OSError('libcudnn')", "AssertionError('2.9')"])
def test_a_broken_transformer_engine_is_named_once_and_left_alone(error, tmp_path, monkeypatch, caplog):
    (tmp_path / "transformer_engine").mkdir()
    (tmp_path / "transformer_engine/__init__.py").write_text(f"raise {error}\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformer_engine"]:
        monkeypatch.delitem(sys.modules, name)
    assert te_attention.load() is None
    assert te_attention.load() is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert error.split("'")[1] in caplog.text


@pytest.mark.parametrize(
    ("groups", "members", "length", "taken"),
    [(4, 8, 1100, True), (4, 8, 300, False), (1, 513, 600, False), (1, 512, 600, True), (1, 2, 8, False)],
)
def test_it_is_taken_for_long_work_in_no_more_runs_than_it_has_plans_for(groups, members, length, taken, monkeypatch):
    layout = attention_on_gpu.timing_layout(groups, members, 4, length)
    query, key = (torch.empty(len(layout.token_ids), heads, 128, device="meta") for heads in (16, 8))
    with monkeypatch.context() as patched:
        patched.setattr(te_attention, "_works", lambda *_: True)
        assert te_attention.takes(query, key, layout.spans) is taken


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
