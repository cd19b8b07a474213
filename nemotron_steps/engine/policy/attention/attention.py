"""Attention over flat tokens, for megatron-core's self-attention: QK-norm, rotary positions, grouped queries, SDPA.

megatron-core's own dot-product attention computes and keeps the whole score matrix, and its context parallelism needs
Transformer Engine. This one works from a TokenLayout, on CPU and CUDA alike.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from nemotron_steps.engine.policy.attention.flash import flat_flash_attention
from nemotron_steps.engine.policy.attention.part_of_queries import part_attention
from nemotron_steps.engine.policy.attention.shared_heads import own_heads
from nemotron_steps.engine.policy.cells import pad, unpad
from nemotron_steps.engine.policy.context_parallel import from_shares, head_shares, to_heads, to_shares, to_tokens
from nemotron_steps.engine.policy.kernels.attention_half import attention_half
from nemotron_steps.engine.policy.kernels.dense import linear
from nemotron_steps.engine.policy.kernels.fused import split_heads
from nemotron_steps.engine.policy.kernels.native_attention import native_attention, runs_natively
from nemotron_steps.models.megatron_core import load_megatron_core

load_megatron_core()

from megatron.core.transformer.attention import SelfAttention  # noqa: E402

if TYPE_CHECKING:
    from nemotron_steps.engine.policy.token_layout import Grid, TokenLayout


class FlatAttention(torch.nn.Module):
    """Scaled dot-product attention of flat tokens; takes the place of megatron-core's core attention."""

    def __init__(self, config: Any, **_: Any) -> None:
        super().__init__()

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: TokenLayout) -> torch.Tensor:
        """Attend within each sequence.

        Args:
            query: [T, heads, head_dim].
            key, value: [T, key-value heads, head_dim].
            layout: where each token belongs.

        Returns:
            [T, heads · head_dim].
        """
        if query.is_cuda and query.dtype is not torch.float32:
            return flat_flash_attention(query, key, value, layout)
        whole, count = layout.whole, layout.whole_tokens
        # Split and not sliced: the gradient is then one concatenation, not a sum of tensors that are mostly zeros.
        sizes = [count, query.shape[0] - layout.padding - count, layout.padding]
        split = [torch.split(tensor, sizes) for tensor in (query, key, value)]
        whole_q, whole_k, whole_v = (_pad(parts[0], whole) for parts in split)
        # Padding is on the right, so causal attention never sees it from a real token.
        out = F.scaled_dot_product_attention(
            whole_q.transpose(1, 2),
            whole_k.transpose(1, 2),
            whole_v.transpose(1, 2),
            is_causal=True,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        outs = [_unpad(out.transpose(1, 2), whole)]
        if layout.suffix is not None:
            padded_q, padded_k, padded_v = (_pad(parts[1], layout.suffix) for parts in split)
            assert layout.parent is not None
            prompt_k, prompt_v = (states.index_select(0, layout.parent) for states in (whole_k, whole_v))
            out = F.scaled_dot_product_attention(
                padded_q.transpose(1, 2),
                torch.cat((prompt_k, padded_k), dim=1).transpose(1, 2),
                torch.cat((prompt_v, padded_v), dim=1).transpose(1, 2),
                attn_mask=layout.mask,
                enable_gqa=query.shape[1] != key.shape[1],
            )
            outs.append(_unpad(out.transpose(1, 2), layout.suffix))
        if layout.padding:
            outs.append(query.new_zeros(layout.padding, query.shape[1] * query.shape[2]))
        return torch.cat(outs) if len(outs) > 1 else outs[0]


class FlatSelfAttention(SelfAttention):  # type: ignore[misc]
    """megatron-core's self-attention with its parameters and names, computing over flat tokens."""

    def __init__(self, config: Any, *args: Any, **settings: Any) -> None:
        super().__init__(config, *args, **settings)
        ranks = config.tensor_model_parallel_size
        self.shares_heads = config.num_query_groups < ranks
        """Whether several tensor-parallel ranks attend to one key-value head."""
        self.groups = 1 if self.shares_heads else config.num_query_groups // ranks
        """Key-value heads of this rank, and so groups of query heads."""
        self.queries = config.num_attention_heads // ranks // self.groups
        """Query heads of a group."""

    def forward(self, hidden: torch.Tensor, layout: TokenLayout, cos_sin: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """Attend.

        Args:
            hidden: [T, 1, hidden], or this rank's share of T under sequence parallelism.
            layout: where each token belongs.
            cos_sin: [2, T, 1, 1, head_dim], cosines and sines of the tokens' positions.

        Returns:
            The same shape as `hidden`.
        """
        mixed = column_linear(self.linear_qkv, hidden)
        config, width = self.config, self.hidden_size_per_attention_head
        scale = self._head_norm() if config.qk_layernorm else None
        if self.shares_heads:
            mixed = own_heads(
                mixed.squeeze(1), config.num_attention_heads, config.num_query_groups, width, self.pg_collection.tp
            )
        grouped = mixed.view(mixed.shape[0], self.groups, self.queries + 2, width)
        if self.config.context_parallel_size == 1 and runs_natively(grouped):
            out = native_attention(grouped, scale, cos_sin, layout, self.config.layernorm_epsilon)
            return row_linear(self.linear_proj, out[:, None])
        query, key, value = split_heads(grouped, scale, cos_sin, self.config.layernorm_epsilon)
        if self.config.context_parallel_size == 1:
            out = self.core_attention(query, key, value, layout)
        else:
            out = self._over_ranks(query, key, value, layout)
        return row_linear(self.linear_proj, out.view(mixed.shape[0], 1, -1))

    def _over_ranks(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: TokenLayout
    ) -> torch.Tensor:
        """[T / ranks, heads or key-value heads, head_dim] of this rank's tokens → [T / ranks, heads · head_dim]."""
        group, tokens = self.pg_collection.cp, query.shape[0]
        ranks = dist.get_world_size(group)
        shares = head_shares(query.shape[1], key.shape[1], ranks, dist.get_rank(group))
        if shares is None:
            whole = [to_heads(states, group) for states in (query, key, value)]
            return to_tokens(self.core_attention(*whole, layout), group)
        query, key, value = to_shares(query, key, value, shares, group)
        if len(shares.of) == ranks:
            out = self.core_attention(query, key, value, layout)
        else:
            out = part_attention(query, key, value, layout.part(shares.ranges(tokens)))
        return from_shares(out, shares, group)

    def after_norm(
        self, hidden: torch.Tensor, norm: torch.nn.RMSNorm, layout: TokenLayout, cos_sin: torch.Tensor
    ) -> torch.Tensor:
        """hidden + attention of its norm, on one rank, in float32 on CPU; shapes as in `forward`."""
        if self.linear_qkv.bias is not None or self.config.context_parallel_size > 1 or not runs_natively(hidden):
            attended: torch.Tensor = self(norm(hidden), layout, cos_sin)
            return hidden + attended
        assert norm.eps is not None
        return attention_half(
            hidden,
            norm.weight,
            self.linear_qkv.weight,
            self._head_norm() if self.config.qk_layernorm else None,
            self.linear_proj.weight,
            cos_sin,
            layout,
            norm.eps,
        )

    def _head_norm(self) -> torch.Tensor:
        """[R + 1, D]: the queries' norm weight R times, then the key's."""
        width = self.hidden_size_per_attention_head
        return torch.cat(
            (self.q_layernorm.weight.expand(self.queries, width), self.k_layernorm.weight.expand(1, width))
        )


def column_linear(module: Any, hidden: torch.Tensor) -> torch.Tensor:
    """megatron-core's column-parallel linear; on one rank a plain one, without its Python autograd function. With its
    adapter, where it has one."""
    if module.tp_group.size() == 1:
        output: torch.Tensor = linear(hidden, module.weight, module.bias)
    else:
        output = module(hidden)[0]
    return _adapted(module, output, hidden)


def row_linear(module: Any, hidden: torch.Tensor) -> torch.Tensor:
    """megatron-core's row-parallel linear; on one rank a plain one. With its adapter, where it has one."""
    if module.tp_group.size() == 1:
        output: torch.Tensor = linear(hidden, module.weight)
    else:
        output = module(hidden)[0]
    return _adapted(module, output, hidden)


def _adapted(module: Any, output: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    adapter = getattr(module, "adapter", None)  # engine/policy/lora.py
    if adapter is None:
        return output
    added: torch.Tensor = adapter.added_to(output, states)
    return added


def _pad(tokens: torch.Tensor, grid: Grid) -> torch.Tensor:
    """[tokens, heads, head_dim] → [rows, width, heads, head_dim]; padding repeats a row's last token."""
    return pad(tokens, grid.pad, grid.unpad).view(grid.rows, grid.width, *tokens.shape[1:])


def _unpad(padded: torch.Tensor, grid: Grid) -> torch.Tensor:
    """[rows, width, heads, head_dim] → [tokens, heads · head_dim]."""
    return unpad(padded.flatten(2).flatten(0, 1), grid.unpad)
