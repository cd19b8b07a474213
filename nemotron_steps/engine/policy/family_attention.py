"""Attention of short rollouts that share prompts, as batched matrix products, for float32 on CPU.

A family is a prompt and the answers to it, equally many for every prompt. All answers' queries meet their prompt's keys
in one product, where `scaled_dot_product_attention` reads the prompt once an answer; and products over a few dozen
tokens go to the library in one call, where its fused kernel makes one for every row and head. Scores are kept for the
backward pass, so this is for small micro-batches alone (`SCORES`).

Shapes: P prompts of at most L tokens, m answers each of at most S tokens, N tokens of answers, h key-value heads, R
query heads for each, D head size. Batches of products are in the order (prompt, key-value head, answer).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    from nemotron_steps.engine.policy.layout import TokenLayout

SCORES = 2**22
"""Most scores of one layer, 16 MiB."""


@dataclass
class Families:
    """Where the tokens of answers lie in the batches of products."""

    prompts: int
    answers: int
    """Of each prompt"""
    width: int
    kv_heads: int
    cells: torch.Tensor
    """int64 [P · h · m · S], (token, key-value head) of each cell; padding repeats an answer's last token."""
    places: torch.Tensor
    """int64 [N · h], cell of each (token, key-value head)."""
    far_bias: torch.Tensor
    """[P · h, 1, L], −∞ behind the end of a prompt."""
    near_bias: torch.Tensor
    """[S · R, S], −∞ for later tokens."""

    @classmethod
    def of(cls, layout: TokenLayout, kv_heads: int, heads: int) -> Families | None:
        """None where rows are not families, or too long."""
        suffix, whole, answers = layout.suffix, layout.whole, layout.members
        if not answers or suffix is None:
            return None
        prompts, width = whole.rows, suffix.width
        if suffix.rows * heads * width * (whole.width + width) > SCORES:
            return None
        cells = torch.arange(suffix.rows * width) if suffix.pad is None else suffix.pad
        places = torch.arange(suffix.rows * width) if suffix.unpad is None else suffix.unpad
        head, family = torch.arange(kv_heads), answers * width
        far = torch.zeros(prompts, 1, whole.width)
        if whole.valid is not None:
            far.masked_fill_(~whole.valid[:, None], -torch.inf)
        near = torch.full((width, width), -torch.inf).triu_(1)
        return cls(
            prompts=prompts,
            answers=answers,
            width=width,
            kv_heads=kv_heads,
            cells=(cells.view(prompts, 1, family) * kv_heads + head[:, None]).flatten(),
            places=(
                (places // family)[:, None] * (kv_heads * family) + head * family + (places % family)[:, None]
            ).flatten(),
            far_bias=far.repeat_interleave(kv_heads, dim=0),
            near_bias=near.repeat_interleave(heads // kv_heads, dim=0),
        )


def family_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    prompt_key: torch.Tensor,
    prompt_value: torch.Tensor,
    families: Families,
) -> torch.Tensor:
    """Attention of answers' tokens over their prompts and themselves.

    Args:
        query: [N, h · R, D].
        key, value: [N, h, D].
        prompt_key, prompt_value: [P, L, h, D].

    Returns:
        [N, h · R · D].
    """
    out: torch.Tensor = _FamilyAttention.apply(query, key, value, prompt_key, prompt_value, families)  # type: ignore[no-untyped-call]
    return out


class _FamilyAttention(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        prompt_key: torch.Tensor,
        prompt_value: torch.Tensor,
        families: Families,
    ) -> torch.Tensor:
        tokens, dim = query.shape[0], query.shape[2]
        batch = families.prompts * families.kv_heads
        queries = query.reshape(tokens * families.kv_heads, -1).index_select(0, families.cells).view(batch, -1, dim)
        near_k, near_v = (
            states.reshape(-1, dim).index_select(0, families.cells).view(batch * families.answers, -1, dim)
            for states in (key, value)
        )
        far_k, far_v = (states.transpose(1, 2).reshape(batch, -1, dim) for states in (prompt_key, prompt_value))
        near_q = queries.view(batch * families.answers, -1, dim)
        scale = dim**-0.5
        far = torch.baddbmm(families.far_bias, queries, far_k.transpose(1, 2), alpha=scale)
        near = torch.baddbmm(families.near_bias, near_q, near_k.transpose(1, 2), alpha=scale)
        weights = torch.cat((far.view(*near.shape[:2], -1), near), dim=-1).softmax(-1)
        far_weights, near_weights = _parts(weights, batch, far.shape[2])
        out = torch.bmm(far_weights, far_v)
        out.view_as(near_q).baddbmm_(near_weights, near_v)
        ctx.save_for_backward(queries, near_k, near_v, far_k, far_v, weights)
        ctx.families = families
        return out.view(families.cells.shape[0], -1).index_select(0, families.places).view(tokens, -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        queries, near_k, near_v, far_k, far_v, weights = ctx.saved_tensors
        families: Families = ctx.families
        batch, dim, length = queries.shape[0], queries.shape[2], far_k.shape[1]
        tokens = grad.shape[0]
        near_q = queries.view(near_k.shape[0], -1, dim)
        cells = grad.new_zeros(families.cells.shape[0], queries.numel() // families.cells.shape[0])
        far_grad = cells.index_copy_(0, families.places, grad.reshape(families.places.shape[0], -1)).view_as(queries)
        near_grad = far_grad.view_as(near_q)
        far_weights, near_weights = _parts(weights, batch, length)
        grad_far_v = torch.bmm(far_weights.transpose(1, 2), far_grad)
        grad_near_v = torch.bmm(near_weights.transpose(1, 2), near_grad)
        far = torch.bmm(far_grad, far_v.transpose(1, 2)).view(*near_q.shape[:2], -1)
        near = torch.bmm(near_grad, near_v.transpose(1, 2))
        scores = torch._softmax_backward_data(torch.cat((far, near), dim=-1), weights, -1, torch.float32)
        far_scores, near_scores = _parts(scores, batch, length)
        scale = dim**-0.5
        grad_q = torch.bmm(far_scores, far_k)
        grad_q.view_as(near_q).baddbmm_(near_scores, near_k)
        grad_far_k = torch.bmm(far_scores.transpose(1, 2), queries).mul_(scale)
        grad_near_k = torch.bmm(near_scores.transpose(1, 2), near_q).mul_(scale)

        def to_tokens(states: torch.Tensor) -> torch.Tensor:
            return states.view(families.cells.shape[0], -1).index_select(0, families.places).view(tokens, -1, dim)

        def to_prompts(states: torch.Tensor) -> torch.Tensor:
            return states.view(families.prompts, families.kv_heads, length, dim).transpose(1, 2)

        return (
            to_tokens(grad_q.mul_(scale)),
            to_tokens(grad_near_k),
            to_tokens(grad_near_v),
            to_prompts(grad_far_k),
            to_prompts(grad_far_v),
            None,
        )


def _parts(scores: torch.Tensor, batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Columns of the prompt, one batch a prompt, and columns of the answer, one batch an answer; views."""
    return scores.view(batch, -1, scores.shape[2])[:, :, :length], scores[:, :, length:]
