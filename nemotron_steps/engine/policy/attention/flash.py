"""Attention over flat tokens, on CUDA in half precision: no padding, and shared prompts attended to in place.

Our own Triton kernels wherever they run (docs/internals/packed_attention.md), else FlashAttention 2, by which a suffix
attends to its prompt and to itself in two calls. Their results are merged by log-sum-exp, and each gradient call is
given the merged result: the probabilities that it recomputes are then those of the whole row (as in ring attention,
arXiv 2310.01889).
"""

from __future__ import annotations

import logging
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    from nemotron_steps.engine.kernels.varlen import Spans
    from nemotron_steps.engine.policy.token_layout import TokenLayout

_LOG = logging.getLogger(__name__)
SIZES = (64, 128)
"""Of heads that our own kernels take; others were not tried."""


def flat_flash_attention(query: Tensor, key: Tensor, value: Tensor, layout: TokenLayout) -> Tensor:
    """As attention.flat_attention: query [T, heads, head_dim] → [T, heads · head_dim]."""
    if packed_takes(query, key):
        return packed_attention(query, key, value, layout).flatten(1)
    return _FlatFlash.apply(query, key, value, layout).flatten(1)


class _FlatFlash(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, layout: TokenLayout) -> Tensor:
        out = torch.zeros_like(query) if layout.padding else torch.empty_like(query)
        spans = layout.spans
        whole = slice(0, layout.whole_tokens)
        out[whole], lse, rng = _forward(query[whole], key[whole], value[whole], spans.whole, spans.whole, causal=True)
        lses = [lse]
        if spans.suffix is not None:
            rest, prompts = slice(layout.whole_tokens, query.shape[0] - layout.padding), slice(0, spans.prompt_tokens)
            assert spans.family is not None and spans.prompt is not None
            over, over_lse, _ = _forward(
                query[rest], key[prompts], value[prompts], spans.family, spans.prompt, causal=False
            )
            own, own_lse, _ = _forward(query[rest], key[rest], value[rest], spans.suffix, spans.suffix, causal=True)
            lse = torch.logaddexp(over_lse, own_lse)
            weights = [(part - lse).exp_().t().unsqueeze(-1) for part in (over_lse, own_lse)]
            merged = over * weights[0]
            merged += own * weights[1]
            out[rest] = merged.to(out.dtype)
            lses.append(lse)
        ctx.save_for_backward(query, key, value, out, rng, *lses)
        ctx.layout = layout
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        query, key, value, out, rng, *lses = ctx.saved_tensors
        layout: TokenLayout = ctx.layout
        spans = layout.spans
        grad = grad.contiguous()
        grads = [torch.zeros_like(t) if layout.padding else torch.empty_like(t) for t in (query, key, value)]
        whole = slice(0, layout.whole_tokens)
        parts = _backward(
            grad[whole], query[whole], key[whole], value[whole], out[whole], lses[0], spans.whole, spans.whole, rng,
            causal=True,
        )  # fmt: skip
        for into, part in zip(grads, parts, strict=True):
            into[whole] = part
        if spans.suffix is not None:
            rest, prompts = slice(layout.whole_tokens, query.shape[0] - layout.padding), slice(0, spans.prompt_tokens)
            assert spans.family is not None and spans.prompt is not None
            over = _backward(
                grad[rest], query[rest], key[prompts], value[prompts], out[rest], lses[1], spans.family, spans.prompt,
                rng, causal=False,
            )  # fmt: skip
            own = _backward(
                grad[rest], query[rest], key[rest], value[rest], out[rest], lses[1], spans.suffix, spans.suffix, rng,
                causal=True,
            )  # fmt: skip
            torch.add(over[0], own[0], out=grads[0][rest])
            for into, to_prompt, to_own in zip(grads[1:], over[1:], own[1:], strict=True):
                into[prompts] += to_prompt
                into[rest] = to_own
        return grads[0], grads[1], grads[2], None


def _forward(
    query: Tensor, key: Tensor, value: Tensor, rows: Spans, columns: Spans, *, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, log-sum-exp float32 [heads, tokens], and the (unused) dropout state."""
    out, lse, rng, _, _ = torch.ops.aten._flash_attention_forward(
        query, key, value, rows.cu_seqlens, columns.cu_seqlens, rows.max_seqlen, columns.max_seqlen, 0.0, causal, False
    )
    return out, lse, rng


def _backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, rows: Spans, columns: Spans,
    rng: Tensor, *, causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    unused = torch.empty(0, device=query.device)
    grads: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
        grad, query, key, value, out, lse, rows.cu_seqlens, columns.cu_seqlens, rows.max_seqlen, columns.max_seqlen,
        0.0, causal, rng, unused,
    )  # fmt: skip
    return grads


def packed_takes(query: Tensor, key: Tensor) -> bool:
    """Whether our own kernels run here. Compiles and tries them once for each kind of head."""
    heads, width = query.shape[1:]
    return query.is_cuda and width in SIZES and _works(query.device, query.dtype, heads, key.shape[1], width)


def packed_attention(query: Tensor, key: Tensor, value: Tensor, layout: TokenLayout) -> Tensor:
    """As attention.flat_attention: query [T, heads, head_dim] → [T, heads, head_dim]."""
    states = (part.contiguous() for part in (query, key, value))
    return _Packed.apply(*states, layout.spans.rows, layout.spans.longest, layout.padding)


class _Packed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, rows: Tensor, longest: int, padding: int
    ) -> Tensor:
        from nemotron_steps.engine.kernels.triton_attention import attention_forward

        out = _like(query, padding)
        lse = attention_forward(query, key, value, rows, longest, out)
        ctx.save_for_backward(query, key, value, out, lse, rows)
        ctx.longest, ctx.padding = longest, padding
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        from nemotron_steps.engine.kernels.triton_attention import attention_backward

        query, key, value, out, lse, rows = ctx.saved_tensors
        grads = _like(query, ctx.padding), _like(key, ctx.padding), _like(value, ctx.padding)
        attention_backward(grad.contiguous(), query, key, value, out, lse, rows, ctx.longest, grads)
        return *grads, None, None, None


def _like(tensor: Tensor, padding: int) -> Tensor:
    """To be filled; its last `padding` tokens, which no row has, are 0."""
    filled = torch.empty_like(tensor)
    if padding:
        filled[-padding:].zero_()
    return filled


@cache
def _works(device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, width: int) -> bool:
    """Both passes on a prompt of one token and two rows of it."""
    rows = torch.tensor([[0, 1, 0, 0, 1, 4], [1, 1, 0, 1, 0, 0], [2, 2, 0, 1, 0, 0]], dtype=torch.int32, device=device)
    query, key = (torch.ones(4, count, width, dtype=dtype, device=device) for count in (heads, kv_heads))
    value = key * torch.tensor([0.0, 1, 2, 3], dtype=dtype, device=device).view(4, 1, 1)
    from_last = torch.zeros_like(query)
    from_last[3] = 1
    grads = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    out = torch.empty_like(query)
    try:
        from nemotron_steps.engine.kernels.triton_attention import attention_backward, attention_forward

        lse = attention_forward(query, key, value, rows, 2, out)
        attention_backward(from_last, query, key, value, out, lse, rows, 2, grads)
        # The last token attends to tokens 0, 2 and 3 alike: a third of its gradient goes to the value of each.
        shared = heads // kv_heads / 3
        for found, expected in ((out, (0, 0.5, 1, 5 / 3)), (grads[2], (shared, 0, shared, shared))):
            right = torch.tensor(expected, device=device).view(4, 1, 1).expand_as(found)
            if not torch.allclose(found.float(), right, atol=0.05, rtol=0.05):
                raise RuntimeError("a wrong result")
    except Exception as error:  # of the compiler, or of a GPU with too little shared memory
        _LOG.warning(
            "%d heads of %d (%d of keys) in %s cannot use the packed attention kernels, FlashAttention is used: %s",
            heads, width, kv_heads, dtype, error,
        )  # fmt: skip
        return False
    return True
