"""Attention of short rollouts that share prompts, as batched matrix products, for float32 on CPU.

A family is a prompt and the answers to it, equally many for every prompt. All answers' queries meet their prompt's keys
in one product, where `scaled_dot_product_attention` reads the prompt once an answer; and products over a few dozen
tokens go to the library in one call, where its fused kernel makes one for every row and head. Scores are kept for the
backward pass, so this is for small micro-batches alone (`SCORES`).

Products need the tokens of a batch side by side: they are gathered into cells, those of prompts first, in the order
(prompt, key-value head, token), then those of answers, in the order (prompt, key-value head, answer, token).

Shapes: P prompts of at most L tokens, m answers each of at most S tokens, T tokens in all, h key-value heads, R query
heads for each, D head size, C = P·h·(L + m·S) cells.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    from nemotron_steps.engine.policy.layout import Grid, TokenLayout

SCORES = 2**22
"""Most scores of one layer, 16 MiB."""

Saved = tuple[torch.Tensor, ...]
"""What the backward pass needs."""


@dataclass
class Families:
    """Where tokens lie in the batches of products."""

    prompts: int
    answers: int
    """Of each prompt"""
    kv_heads: int
    prompt_cells: int
    cells: torch.Tensor
    """int64 [C], (token, key-value head) of each cell; padding repeats a row's last token."""
    places: torch.Tensor
    """int64 [T · h], cell of each (token, key-value head), without the tokens that pad the layout."""
    padding: torch.Tensor | None
    """int64, cells that are padding; None when there are none."""
    prompt_bias: torch.Tensor
    """[L · R, L], −∞ for later tokens of a prompt."""
    far_bias: torch.Tensor
    """[P · h, 1, L], −∞ behind the end of a prompt."""
    near_bias: torch.Tensor
    """[S · R, S], −∞ for later tokens of an answer."""

    @classmethod
    def of(cls, layout: TokenLayout, kv_heads: int, heads: int) -> Families | None:
        """None where rows are not families, or too long."""
        suffix, whole, answers = layout.suffix, layout.whole, layout.members
        if not answers or suffix is None:
            return None
        prompts, queries = whole.rows, heads // kv_heads
        if suffix.rows * heads * suffix.width * (whole.width + suffix.width) > SCORES:
            return None
        prompt_cells = prompts * kv_heads * whole.width
        of_prompts, places_of_prompts = _cells(whole, prompts, kv_heads)
        of_answers, places_of_answers = _cells(suffix, prompts, kv_heads)
        cells = torch.cat((of_prompts, of_answers + layout.whole_tokens * kv_heads))
        places = torch.cat((places_of_prompts, places_of_answers + prompt_cells))
        padding = None
        if len(places) < len(cells):
            is_padding = torch.ones(len(cells), dtype=torch.bool).index_fill_(0, places, False)
            padding = is_padding.nonzero().flatten()
        far = torch.zeros(prompts, 1, whole.width)
        if whole.valid is not None:
            far.masked_fill_(~whole.valid[:, None], -torch.inf)
        return cls(
            prompts=prompts,
            answers=answers,
            kv_heads=kv_heads,
            prompt_cells=prompt_cells,
            cells=cells,
            places=places,
            padding=padding,
            prompt_bias=_causal_bias(whole.width, queries),
            far_bias=far.repeat_interleave(kv_heads, dim=0),
            near_bias=_causal_bias(suffix.width, queries),
        )

    def to_cells(self, states: torch.Tensor) -> torch.Tensor:
        """[T, h, X] → [C, X]. Gradients of the inverse are `to_cells` without what fell into padding."""
        return states.flatten(0, 1).index_select(0, self.cells)

    def to_tokens(self, cells: torch.Tensor, tokens: torch.Tensor) -> None:
        """[C, X] → [T, h, X], written to `tokens`; 0 for tokens that pad the layout. Any strides that flatten."""
        real = self.places.shape[0] // self.kv_heads
        tokens[:real] = cells.view(cells.shape[0], -1).index_select(0, self.places).view(tokens[:real].shape)
        tokens[real:] = 0


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, families: Families
) -> tuple[torch.Tensor, Saved]:
    """Attention of every token over its prompt and what precedes it in its answer. Call without gradients.

    Args:
        query: [T, h, R · D]; of any strides that let T and h be flattened, as key and value.
        key, value: [T, h, D].

    Returns:
        [T, h, R · D], and what `attend_backward` needs.
    """
    dim, batch, rows = key.shape[2], *_batches(families)
    queries, keys, values = (families.to_cells(states) for states in (query, key, value))
    scale, split = dim**-0.5, families.prompt_cells
    prompt_q, answer_q = queries[:split].view(batch, -1, dim), queries[split:].view(batch, -1, dim)
    prompt_k, prompt_v = keys[:split].view(batch, -1, dim), values[:split].view(batch, -1, dim)
    near_q, near_k, near_v = (states[split:].view(rows, -1, dim) for states in (queries, keys, values))
    length = prompt_k.shape[1]
    out = torch.empty_like(queries)
    # Padding is on the right, so causal attention never sees it from a real token.
    prompt_weights = torch.baddbmm(families.prompt_bias, prompt_q, prompt_k.transpose(1, 2), alpha=scale).softmax(-1)
    torch.bmm(prompt_weights, prompt_v, out=out[:split].view_as(prompt_q))
    far = torch.baddbmm(families.far_bias, answer_q, prompt_k.transpose(1, 2), alpha=scale)
    near = torch.baddbmm(families.near_bias, near_q, near_k.transpose(1, 2), alpha=scale)
    weights = torch.cat((far.view(*near.shape[:2], -1), near), dim=-1).softmax(-1)
    far_weights, near_weights = _parts(weights, batch, length)
    answers = out[split:]
    torch.bmm(far_weights, prompt_v, out=answers.view_as(answer_q))
    answers.view_as(near_q).baddbmm_(near_weights, near_v)
    attended = query.new_empty(query.shape)
    families.to_tokens(out, attended)
    return attended, (queries, keys, values, prompt_weights, weights)


def attend_backward(
    grad: torch.Tensor,
    saved: Saved,
    families: Families,
    grad_query: torch.Tensor,
    grad_key: torch.Tensor,
    grad_value: torch.Tensor,
) -> None:
    """Write the gradients to the last three, of the shapes that `attend` took.

    Args:
        grad: [T, h, R · D].
        saved: by `attend`.
    """
    queries, keys, values, prompt_weights, weights = saved
    dim, batch, rows = keys.shape[1], *_batches(families)
    scale, split = dim**-0.5, families.prompt_cells
    cells = families.to_cells(grad)
    if families.padding is not None:
        cells.index_fill_(0, families.padding, 0.0)
    prompt_g, prompt_q, prompt_k, prompt_v, answer_g, answer_q = (
        states.view(batch, -1, dim)
        for states in (*(s[:split] for s in (cells, queries, keys, values)), cells[split:], queries[split:])
    )
    near_g, near_q, near_k, near_v = (s[split:].view(rows, -1, dim) for s in (cells, queries, keys, values))
    far_weights, near_weights = _parts(weights, batch, prompt_k.shape[1])
    by_query, by_key, by_value = (torch.empty_like(states) for states in (queries, keys, values))

    far_v = by_value[:split].view_as(prompt_v)
    torch.bmm(far_weights.transpose(1, 2), answer_g, out=far_v)
    far_v.baddbmm_(prompt_weights.transpose(1, 2), prompt_g)
    torch.bmm(near_weights.transpose(1, 2), near_g, out=by_value[split:].view_as(near_v))

    far = torch.bmm(answer_g, prompt_v.transpose(1, 2)).view(*near_q.shape[:2], -1)
    near = torch.bmm(near_g, near_v.transpose(1, 2))
    scores = _softmax_backward(torch.cat((far, near), dim=-1), weights)
    prompt_scores = _softmax_backward(torch.bmm(prompt_g, prompt_v.transpose(1, 2)), prompt_weights)
    far_scores, near_scores = _parts(scores, batch, prompt_k.shape[1])

    torch.bmm(prompt_scores, prompt_k, out=by_query[:split].view_as(prompt_q))
    torch.bmm(far_scores, prompt_k, out=by_query[split:].view_as(answer_q))
    by_query[split:].view_as(near_q).baddbmm_(near_scores, near_k)
    far_k = by_key[:split].view_as(prompt_k)
    torch.bmm(far_scores.transpose(1, 2), answer_q, out=far_k)
    far_k.baddbmm_(prompt_scores.transpose(1, 2), prompt_q)
    torch.bmm(near_scores.transpose(1, 2), near_q, out=by_key[split:].view_as(near_k))

    families.to_tokens(by_query.mul_(scale), grad_query)
    families.to_tokens(by_key.mul_(scale), grad_key)
    families.to_tokens(by_value, grad_value)


def family_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, families: Families) -> torch.Tensor:
    """`attend` with gradients.

    Args:
        query: [T, h · R, D].
        key, value: [T, h, D].

    Returns:
        [T, h · R · D].
    """
    out: torch.Tensor = _FamilyAttention.apply(query, key, value, families)  # type: ignore[no-untyped-call]
    return out


class _FamilyAttention(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, families: Families
    ) -> torch.Tensor:
        attended, saved = attend(query.reshape(*key.shape[:2], -1), key, value, families)
        ctx.save_for_backward(*saved)
        ctx.families = families
        return attended.flatten(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        families: Families = ctx.families
        saved = ctx.saved_tensors  # read once: activation checkpointing recomputes what it holds
        dim = saved[1].shape[1]
        by_group = grad.reshape(grad.shape[0], families.kv_heads, -1)
        by_query = torch.empty_like(by_group)
        by_key, by_value = (grad.new_empty(grad.shape[0], families.kv_heads, dim) for _ in range(2))
        attend_backward(by_group, saved, families, by_query, by_key, by_value)
        return by_query.view(grad.shape[0], -1, dim), by_key, by_value, None


def _cells(grid: Grid, prompts: int, kv_heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(token, head) of each cell, and cell of each (token, head), both counted from the grid's first."""
    family = grid.rows * grid.width // prompts
    pad = torch.arange(grid.rows * grid.width) if grid.pad is None else grid.pad
    unpad = torch.arange(grid.rows * grid.width) if grid.unpad is None else grid.unpad
    head = torch.arange(kv_heads)
    cells = pad.view(prompts, 1, family) * kv_heads + head[:, None]
    places = (unpad // family)[:, None] * (kv_heads * family) + head * family + (unpad % family)[:, None]
    return cells.flatten(), places.flatten()


def _causal_bias(width: int, queries: int) -> torch.Tensor:
    return torch.full((width, width), -torch.inf).triu_(1).repeat_interleave(queries, dim=0)


def _batches(families: Families) -> tuple[int, int]:
    batch = families.prompts * families.kv_heads
    return batch, batch * families.answers


def _parts(scores: torch.Tensor, batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Columns of the prompt, one batch a prompt, and columns of the answer, one batch an answer; views."""
    return scores.view(batch, -1, scores.shape[2])[:, :, :length], scores[:, :, length:]


def _softmax_backward(grad: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return torch._softmax_backward_data(grad, weights, -1, torch.float32)
