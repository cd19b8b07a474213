"""Attention over flat tokens by our own Triton kernels: a suffix's prompt and its own tokens in one pass.

Faster than FlashAttention's calls for every length that was measured, 1.2 to 2.5 times, and nearer to float32
(docs/benchmarks.md). Not for heads of other sizes than SIZES, and GPUs whose shared memory is too small for them.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    from nemotron_steps.engine.policy.token_layout import TokenLayout

_LOG = logging.getLogger(__name__)
SIZES = (64, 128)
"""Of heads; others were not tried."""


def takes(query: torch.Tensor, key: torch.Tensor) -> bool:
    """Whether the kernels run here. Compiles and tries them once for each kind of head."""
    heads, width = query.shape[1:]
    return query.is_cuda and width in SIZES and _works(query.device, query.dtype, heads, key.shape[1], width)


def packed_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: TokenLayout) -> torch.Tensor:
    """As attention.FlatAttention.forward: query [T, heads, head_dim] → [T, heads, head_dim]."""
    spans = layout.spans
    out: torch.Tensor = _Packed.apply(  # type: ignore[no-untyped-call]
        query.contiguous(), key.contiguous(), value.contiguous(), spans.rows, spans.longest, layout.padding
    )
    return out


class _Packed(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rows: torch.Tensor,
        longest: int,
        padding: int,
    ) -> torch.Tensor:
        from nemotron_steps.engine.policy.kernels.triton_attention import attention_forward

        out = _like(query, padding)
        lse = attention_forward(query, key, value, rows, longest, out)
        ctx.save_for_backward(query, key, value, out, lse, rows)
        ctx.longest, ctx.padding = longest, padding
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        from nemotron_steps.engine.policy.kernels.triton_attention import attention_backward

        query, key, value, out, lse, rows = ctx.saved_tensors
        grads = _like(query, ctx.padding), _like(key, ctx.padding), _like(value, ctx.padding)
        attention_backward(grad.contiguous(), query, key, value, out, lse, rows, ctx.longest, grads)
        return *grads, None, None, None


def _like(tensor: torch.Tensor, padding: int) -> torch.Tensor:
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
        from nemotron_steps.engine.policy.kernels.triton_attention import attention_backward, attention_forward

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
