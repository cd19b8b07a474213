"""cuDNN's attention through Transformer Engine, where that is installed: the two calls of flash.py, on CUDA.

Arguments and results are those of flash.py's calls of torch's FlashAttention, so either takes the other's place. cuDNN
builds a plan, for tenths of a second, for every size it meets: sizes are rounded up here, and Transformer Engine
itself rounds the numbers of runs and tokens.
"""

from __future__ import annotations

import importlib.util
import inspect
import logging
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nemotron_steps.engine.kernels.varlen import RowSpans, Spans

_LOG = logging.getLogger(__name__)
MOST_RUNS = 512
"""Of more runs than these Transformer Engine does not round the number, and every number would be a plan of its own."""
LEAST_WORK = 2**28
"""tokens · heads · longest run from which it is faster. Its launches take longer: on an H200 48 sequences of 300 tokens
(2**26) are 0.24 ms forward for torch and 0.54 for it, 64 of 4,096 (2**34) are 13.9 and 9.0."""


class Library(NamedTuple):
    """What is called of Transformer Engine."""

    forward: Callable[..., Any]
    backward: Callable[..., Any]
    backend: Any
    gradient_dtypes: dict[torch.dtype, Any]


def takes(query: Tensor, key: Tensor, spans: RowSpans) -> bool:
    """Whether a layout's attention goes to Transformer Engine. Imports and tries it once for each kind of head."""
    parts = [part for part in (spans.whole, spans.suffix) if part is not None]
    tokens, heads, head_dim = query.shape
    if max(len(part.cu_seqlens) - 1 for part in parts) > MOST_RUNS:
        return False
    if tokens * heads * spans.longest < LEAST_WORK:
        return False
    return _works(query.device, query.dtype, heads, head_dim, key.shape[1])


def forward(
    query: Tensor, key: Tensor, value: Tensor, rows: Spans, columns: Spans, *, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Output [tokens, heads, head_dim], log-sum-exp float32 [heads, tokens], and the (unused) dropout state."""
    library = load()
    assert library is not None
    out, (statistics, rng, *_) = _call(
        library.forward,
        **_common(query, key, value, rows, columns, causal),
        fused_attention_backend=library.backend,
        is_training=True,  # else there are no statistics
    )
    return out, statistics.squeeze(-1).t(), rng


def backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    rows: Spans,
    columns: Spans,
    rng: Tensor,
    *,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value. lse as from `forward`."""
    library = load()
    assert library is not None
    grads = _call(
        library.backward,
        **_common(query, key, value, rows, columns, causal),
        fused_attention_backend=library.backend,
        o=out.contiguous(),
        d_o=grad.contiguous(),
        aux_ctx_tensors=[lse.t().contiguous().unsqueeze(-1), rng],
        do_format="thd",
        dqkv_layout="thd_thd_thd",
        dqkv_dtype=library.gradient_dtypes[query.dtype],
    )
    return grads[0], grads[1], grads[2]


def rounded(longest: int) -> int:
    """A run length that stands for all a little shorter ones: the power of 2 from it, at least 64."""
    return max(64, 1 << (longest - 1).bit_length())


def _common(query: Tensor, key: Tensor, value: Tensor, rows: Spans, columns: Spans, causal: bool) -> dict[str, Any]:
    return {
        "max_seqlen_q": rounded(rows.max_seqlen),
        "max_seqlen_kv": rounded(columns.max_seqlen),
        "cu_seqlens_q": rows.cu_seqlens,
        "cu_seqlens_kv": columns.cu_seqlens,
        "cu_seqlens_q_padded": rows.cu_seqlens,
        "cu_seqlens_kv_padded": columns.cu_seqlens,
        "q": query.contiguous(),
        "k": key.contiguous(),
        "v": value.contiguous(),
        "fake_dtype": query.dtype,
        "qkv_layout": "thd_thd_thd",
        "o_format": "thd",
        "attn_mask_type": "padding_causal" if causal else "padding",
    }


def _call(function: Callable[..., Any], **arguments: Any) -> Any:
    """With those of the arguments that this version of Transformer Engine has."""
    return function(**{name: value for name, value in arguments.items() if name in _parameters(function)})


@cache
def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


@cache
def load() -> Library | None:
    """Transformer Engine; None where it is not installed, and, said once in the log, where it cannot be imported."""
    if importlib.util.find_spec("transformer_engine") is None:
        return None
    try:
        from transformer_engine.pytorch.constants import TE_DType
        from transformer_engine.pytorch.cpp_extensions import fused_attn
    except Exception as error:  # built for another torch, CUDA or cuDNN, it fails in as many ways
        _LOG.warning("Transformer Engine is installed but cannot be imported, torch's attention is used: %s", error)
        return None
    backend = fused_attn.FusedAttnBackend["F16_arbitrary_seqlen"]
    return Library(fused_attn.fused_attn_fwd, fused_attn.fused_attn_bwd, backend, TE_DType)


@cache
def _works(device: torch.device, dtype: torch.dtype, heads: int, head_dim: int, kv_heads: int) -> bool:
    """Both calls on a few tokens: cuDNN may lack a plan for these heads on this GPU, or be of another version."""
    if load() is None:
        return False
    spans = Spans(torch.tensor([0, 5, 8], dtype=torch.int32, device=device), 5)
    query, key = (torch.ones(8, count, head_dim, dtype=dtype, device=device) for count in (heads, kv_heads))
    value = key * torch.arange(8, dtype=dtype, device=device).view(8, 1, 1)  # of which results are means
    try:
        for causal, means in ((True, (0, 0.5, 1, 1.5, 2, 5, 5.5, 6)), (False, (2, 2, 2, 2, 2, 6, 6, 6))):
            out, lse, rng = forward(query, key, value, spans, spans, causal=causal)
            # Before cuDNN 9.6, and on some GPUs since, they are padded to [runs, heads, longest].
            if lse.shape != (heads, 8):
                raise RuntimeError(f"softmax statistics of shape {tuple(lse.shape)}")
            expected = torch.tensor(means, dtype=torch.float32, device=device).view(8, 1, 1)
            if not torch.allclose(out.float(), expected, atol=0.05):
                raise RuntimeError("a wrong result, as of a version that calls its arguments otherwise")
            backward(out, query, key, value, out, lse, spans, spans, rng, causal=causal)
    except Exception as error:
        _LOG.warning(
            "Transformer Engine does not take %d heads of %d (%d of keys) in %s, torch's attention is used: %s",
            heads, head_dim, kv_heads, dtype, error,
        )  # fmt: skip
        return False
    return True
