"""Transformer Engine's attention: the same as torch's where it runs, and left alone where it is absent or broken."""

from __future__ import annotations

import importlib.util
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nemotron_steps.engine.kernels.varlen import Spans, to_device
from nemotron_steps.engine.policy.attention import te_attention
from nemotron_steps.engine.policy.attention.flash import flat_flash_attention
from tests.engine.policy.attention import attention_on_gpu


@pytest.fixture
def unloaded():
    """As a process that has not asked for Transformer Engine."""
    te_attention.load.cache_clear()
    te_attention._works.cache_clear()
    yield
    te_attention.load.cache_clear()
    te_attention._works.cache_clear()


def _installed() -> bool:
    return torch.cuda.is_available() and te_attention.load() is not None


@pytest.mark.cuda
@pytest.mark.skipif(not _installed(), reason="needs CUDA and Transformer Engine")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("heads", attention_on_gpu.HEADS, ids=str)
@pytest.mark.parametrize("layout", attention_on_gpu.LAYOUTS)
def test_output_and_gradients_are_as_near_to_float32_as_those_of_torch(layout, heads, dtype):
    found = attention_on_gpu.errors(attention_on_gpu.layout_of(layout), heads, dtype)
    assert not attention_on_gpu.wrong(found)


@pytest.mark.cuda
@pytest.mark.skipif(not _installed(), reason="needs CUDA and Transformer Engine")
def test_it_is_used_without_being_asked_for(monkeypatch):
    layout = to_device(attention_on_gpu.timing_layout(2, 2, 64, 4096), torch.device("cuda"))
    tensors = attention_on_gpu.tensors_of(layout, attention_on_gpu.HEADS[0], torch.bfloat16)
    called = []
    forward = te_attention.forward
    monkeypatch.setattr(te_attention, "forward", lambda *a, **k: called.append(1) or forward(*a, **k))
    flat_flash_attention(*tensors[:3], layout)
    assert called


def stand_in(mask_argument: str):
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
def test_a_version_whose_arguments_have_other_names_is_left_alone(mask_argument, works, monkeypatch, caplog, unloaded):
    with monkeypatch.context() as patched:
        patched.setattr(te_attention, "load", lambda: stand_in(mask_argument))
        assert te_attention._works(torch.device("cpu"), torch.float32, 4, 16, 2) is works
    assert ("calls its arguments otherwise" in caplog.text) is not works


def test_queries_and_keys_have_their_own_runs_and_gradients_the_statistics_as_they_came(monkeypatch):
    told = {}

    def noted(
        max_seqlen_q, max_seqlen_kv, cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded, q, k, v,
        attn_mask_type, o=None, d_o=None, aux_ctx_tensors=(),
    ):  # fmt: skip
        told.update(locals())
        return (q, k, v) if aux_ctx_tensors else (q, (torch.arange(12.0).view(6, 2, 1), "rng"))

    library = te_attention.Library(noted, noted, "backend", {torch.float32: None})
    monkeypatch.setattr(te_attention, "load", lambda: library)
    rows, columns = Spans(torch.tensor([0, 2, 6]), 70), Spans(torch.tensor([0, 1, 3]), 300)
    query, key, value, grad = (torch.randn(length, 2, 4) for length in (6, 3, 3, 6))
    out, lse, rng = te_attention.forward(query, key, value, rows, columns, causal=False)
    assert torch.equal(lse, torch.arange(12.0).view(6, 2).t()) and rng == "rng"
    for causal in (True, False):
        found = te_attention.backward(grad, query, key, value, out, lse, rows, columns, rng, causal=causal)
        assert all(torch.equal(mine, given) for mine, given in zip(found, (query, key, value), strict=True))
        assert (told["max_seqlen_q"], told["max_seqlen_kv"]) == (128, 512)
        for name, spans in (("q", rows), ("kv", columns)):
            assert told[f"cu_seqlens_{name}"] is told[f"cu_seqlens_{name}_padded"] is spans.cu_seqlens
        assert told["attn_mask_type"] == ("padding_causal" if causal else "padding")
        assert torch.equal(told["o"], query) and torch.equal(told["d_o"], grad)
        statistics, drawn = told["aux_ctx_tensors"]
        assert torch.equal(statistics, torch.arange(12.0).view(6, 2, 1)) and drawn == "rng"


def test_where_it_is_not_installed_nothing_is_said(monkeypatch, caplog, unloaded):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert te_attention.load() is None and not caplog.records


def broken_package(folder: Path, error: str) -> Path:
    """A folder with a Transformer Engine whose import ends in this error."""
    package = folder / "transformer_engine"
    package.mkdir()
    (package / "__init__.py").write_text(f"raise {error}\n")
    return folder


@pytest.mark.parametrize("error", ["ImportError('undefined symbol')", "OSError('libcudnn')", "AssertionError('2.9')"])
def test_a_broken_transformer_engine_is_named_once_and_left_alone(error, tmp_path, monkeypatch, caplog, unloaded):
    monkeypatch.syspath_prepend(broken_package(tmp_path, error))
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformer_engine"]:
        monkeypatch.delitem(sys.modules, name)
    assert te_attention.load() is None
    assert te_attention.load() is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert error.split("'")[1] in caplog.text


def test_the_policy_can_be_imported_beside_a_broken_transformer_engine(tmp_path):
    root = Path(__file__).parents[4]
    broken = broken_package(tmp_path, "OSError('undefined symbol')")
    paths = os.pathsep.join([str(broken), str(root), os.environ.get("PYTHONPATH", "")])
    program = "from nemotron_steps.engine.policy import megatron; print(megatron.MegatronPolicy.__name__)"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout == "MegatronPolicy\n", done.stderr


@pytest.mark.parametrize(
    ("groups", "members", "length", "taken"),
    [(4, 8, 1100, True), (4, 8, 300, False), (1, 513, 600, False), (1, 512, 600, True), (1, 2, 8, False)],
)
def test_it_is_taken_for_long_work_in_no_more_runs_than_it_has_plans_for(groups, members, length, taken, monkeypatch):
    monkeypatch.setattr(te_attention, "_works", lambda *_: True)
    layout = attention_on_gpu.timing_layout(groups, members, 4, length)
    query, key = (torch.empty(len(layout.token_ids), heads, 128, device="meta") for heads in (16, 8))
    assert te_attention.takes(query, key, layout.spans) is taken


def test_lengths_a_little_apart_share_a_plan():
    assert [te_attention.rounded(longest) for longest in (1, 64, 65, 300, 512, 513)] == [64, 64, 128, 512, 512, 1024]
