"""Parts of a layer over flat tokens, with megatron-core's parameters: norm, linears with adapters, MLP, self-attention.

On CUDA in half precision attention is by our own Triton kernels (docs/internals/packed_attention.md) where they run,
without padding and with shared prompts attended to in place; by torch's over padded rows elsewhere."""

import logging
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from nemotron_steps.engine.kernels.cpu_layers import attention_half, feed_forward, native_attention, runs_natively
from nemotron_steps.engine.kernels.fused import activation, linear, rms_norm, split_heads
from nemotron_steps.engine.policy.distributed.context_parallel import (
    collect,
    columns,
    head_shares,
    spread,
    to_heads,
    to_tokens,
)
from nemotron_steps.engine.policy.distributed.parallel_dims import device
from nemotron_steps.engine.policy.token_layout import Grid, TokenLayout, VarlenSegments, pad, size, unpad
from nemotron_steps.models.megatron_core import load_megatron_core

load_megatron_core()

from megatron.core import parallel_state  # noqa: E402
from megatron.core.process_groups_config import ProcessGroupCollection  # noqa: E402
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear  # noqa: E402
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules  # noqa: E402
from megatron.core.transformer.enums import AttnMaskType  # noqa: E402
from megatron.core.transformer.identity_op import IdentityOp  # noqa: E402

_LOG = logging.getLogger(__name__)
SIZES = (64, 128)
"""Of heads that our own kernels take; others were not tried."""


class RmsNorm(torch.nn.RMSNorm):
    """torch's RMSNorm with the constructor megatron-core's specs call."""

    eps: float

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, device=device(), dtype=config.params_dtype)

    def forward(self, states: Tensor) -> Tensor:
        """[…, hidden_size] → the same shape."""
        return rms_norm(states, self.weight, self.eps)

    def after_adding(self, states: Tensor, added: Tensor | None) -> tuple[Tensor, Tensor]:
        """states + added (None: nothing), and its norm."""
        total = states if added is None else states + added
        return total, self(total)


class Mlp(torch.nn.Module):
    """linear_fc2 · activation(linear_fc1 · x), without biases; `width`: inner size of the whole MLP."""

    def __init__(self, config: Any, kind: str, width: int) -> None:
        super().__init__()
        self.activate, rows = activation(kind)
        self.gated = rows == 2
        ranks = parallel_state.get_tensor_model_parallel_group()
        settings: dict[str, Any] = {"config": config, "bias": False, "skip_bias_add": True, "tp_group": ranks}
        self.linear_fc1 = ColumnParallelLinear(
            config.hidden_size, rows * width, init_method=config.init_method, gather_output=False, **settings
        )
        self.linear_fc2 = RowParallelLinear(
            width, config.hidden_size, init_method=config.output_layer_init_method, input_is_parallel=True, **settings
        )

    def forward(self, hidden: Tensor, *_: Any) -> Tensor:
        """[T, 1, hidden] → the same shape."""
        return row_linear(self.linear_fc2, self.activate(column_linear(self.linear_fc1, hidden)))

    def after_norm(self, hidden: Tensor, norm: RmsNorm, *_: Any) -> Tensor:
        """hidden + MLP of its norm, on one rank, in float32 on CPU."""
        if not runs_natively(hidden):
            return hidden + self(norm(hidden))
        up, down = self.linear_fc1.weight, self.linear_fc2.weight
        return feed_forward(hidden, norm.weight, up, down, norm.eps, gated=self.gated)


def column_linear(module: Any, hidden: Tensor) -> Tensor:
    """megatron-core's column-parallel linear, and its adapter; on one rank a plain one."""
    plain = module.tp_group.size() == 1
    return _adapted(module, linear(hidden, module.weight, module.bias) if plain else module(hidden)[0], hidden)


def row_linear(module: Any, hidden: Tensor) -> Tensor:
    """megatron-core's row-parallel linear, and its adapter; on one rank a plain one."""
    plain = module.tp_group.size() == 1
    return _adapted(module, linear(hidden, module.weight) if plain else module(hidden)[0], hidden)


def _adapted(module: Any, output: Tensor, states: Tensor) -> Tensor:
    adapter = getattr(module, "adapter", None)  # lora.py
    return output if adapter is None else adapter.added_to(output, states)


def flat_attention(query: Tensor, key: Tensor, value: Tensor, layout: TokenLayout) -> Tensor:
    """[T, heads, head_dim] with [T, key-value heads, head_dim] → [T, heads · head_dim]."""
    if packed_takes(query, key):
        return packed_attention(query, key, value, layout).flatten(1)
    whole, count, gqa = layout.whole, layout.whole_tokens, query.shape[1] != key.shape[1]
    # Split and not sliced: the gradient is then one concatenation, not a sum of tensors that are mostly zeros.
    sizes = [count, query.shape[0] - layout.padding - count, layout.padding]
    split = [torch.split(tensor, sizes) for tensor in (query, key, value)]
    if gqa and query.is_cuda:  # where no fast kernel of torch takes grouped heads and a mask
        times = query.shape[1] // key.shape[1]
        split[1:] = [tuple(p.repeat_interleave(times, dim=1) for p in parts) for parts in split[1:]]
        gqa = False
    whole_q, whole_k, whole_v = (_pad(parts[0], whole) for parts in split)
    # Padding is on the right, so causal attention never sees it from a real token.
    out = F.scaled_dot_product_attention(
        whole_q.transpose(1, 2), whole_k.transpose(1, 2), whole_v.transpose(1, 2), is_causal=True, enable_gqa=gqa
    )
    outs = [_unpad(out.transpose(1, 2), whole)]
    if layout.suffix is not None and layout.parent is not None:
        padded_q, padded_k, padded_v = (_pad(parts[1], layout.suffix) for parts in split)
        prompt_k, prompt_v = (states.index_select(0, layout.parent) for states in (whole_k, whole_v))
        out = F.scaled_dot_product_attention(
            padded_q.transpose(1, 2),
            torch.cat((prompt_k, padded_k), dim=1).transpose(1, 2),
            torch.cat((prompt_v, padded_v), dim=1).transpose(1, 2),
            attn_mask=layout.mask,
            enable_gqa=gqa,
        )
        outs.append(_unpad(out.transpose(1, 2), layout.suffix))
    if layout.padding:
        outs.append(query.new_zeros(layout.padding, query.shape[1] * query.shape[2]))
    return torch.cat(outs) if len(outs) > 1 else outs[0]


def packed_takes(query: Tensor, key: Tensor) -> bool:
    """Whether our own kernels run here. Compiles and tries them once for each kind of head."""
    heads, width = query.shape[1:]
    half = query.is_cuda and query.dtype is not torch.float32
    return half and width in SIZES and _works(query.device, query.dtype, heads, key.shape[1], width)


def packed_attention(query: Tensor, key: Tensor, value: Tensor, layout: TokenLayout) -> Tensor:
    """As flat_attention: query [T, heads, head_dim] → [T, heads, head_dim]."""
    states = (part.contiguous() for part in (query, key, value))
    longest = max(part.width for part in (layout.whole, layout.suffix) if part is not None)
    return _Packed.apply(*states, layout.rows, longest, layout.padding)


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
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # of the compiler, or of a GPU with too little shared memory
        _LOG.warning(
            "%d heads of %d (%d of keys) in %s cannot use the packed attention kernels, torch's are used: %s",
            heads, width, kv_heads, dtype, error,
        )  # fmt: skip
        return False
    return True


def part_attention(query: Tensor, key: Tensor, value: Tensor, part: VarlenSegments) -> Tensor:
    """Attend within each sequence: query [queries, heads, head_dim], in the order of `part`, to keys of all T tokens.
    Every rank has queries, if only padding's, so that all take part in every exchange of the backward pass."""
    if query.is_cuda and query.dtype is not torch.float32:
        seen_keys, seen_values = key.index_select(0, part.keys), value.index_select(0, part.keys)
        flash: Tensor = torch.ops.aten._flash_attention_forward(
            query.contiguous(), seen_keys, seen_values, *part.cu_seqlens, *part.max_seqlens, 0.0, True, False
        )[0]
        return flash.flatten(1)
    outs = []
    queries = torch.split(query, [size(segment.queries) for segment in part.segments])
    for segment, asking in zip(part.segments, queries, strict=True):
        seen = [torch.cat([of[first:after] for first, after in segment.keys]) for of in (key, value)]
        rows, columns = asking.shape[0], seen[0].shape[0]
        mask = torch.ones(rows, columns, dtype=torch.bool, device=query.device).tril_(columns - rows)
        heads_first = [states.transpose(0, 1)[None] for states in (asking, *seen)]
        out = F.scaled_dot_product_attention(
            heads_first[0],
            heads_first[1],
            heads_first[2],
            attn_mask=mask if rows < columns else None,
            is_causal=rows == columns,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        outs.append(out[0].transpose(0, 1))
    return torch.cat(outs).flatten(1)


class FlatSelfAttention(SelfAttention):  # type: ignore[misc]
    """megatron-core's self-attention, over flat tokens."""

    def __init__(self, config: Any, number: int, head_norm: type[torch.nn.Module] | None) -> None:
        super().__init__(
            config=config,
            submodules=SelfAttentionSubmodules(
                linear_qkv=ColumnParallelLinear,
                core_attention=IdentityOp,
                linear_proj=RowParallelLinear,
                q_layernorm=head_norm or IdentityOp,
                k_layernorm=head_norm or IdentityOp,
            ),
            layer_number=number,
            attn_mask_type=AttnMaskType.causal,
            pg_collection=ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"]),
        )
        ranks = config.tensor_model_parallel_size
        self.shares_heads = config.num_query_groups < ranks
        self.groups = 1 if self.shares_heads else config.num_query_groups // ranks
        self.queries = config.num_attention_heads // ranks // self.groups

    def forward(self, hidden: Tensor, layout: TokenLayout, cos_sin: Tensor) -> Tensor:
        """hidden [T, 1, hidden], or this rank's share of T → the same; cos_sin [2, T, 1, 1, head_dim]."""
        config, width = self.config, self.hidden_size_per_attention_head
        mixed = column_linear(self.linear_qkv, hidden)
        if self.shares_heads:
            tp, counts = self.pg_collection.tp, (config.num_attention_heads, config.num_query_groups)
            mixed = spread(mixed.squeeze(1), columns(*counts, width, tp.size(), tp.rank()), tp)
        grouped = mixed.view(mixed.shape[0], self.groups, self.queries + 2, width)
        scale = self._head_norm() if config.qk_layernorm else None
        if config.context_parallel_size == 1 and runs_natively(grouped):
            out = native_attention(grouped, scale, cos_sin, layout, config.layernorm_epsilon)
            return row_linear(self.linear_proj, out[:, None])
        heads = split_heads(grouped, scale, cos_sin, config.layernorm_epsilon)
        out = (flat_attention if config.context_parallel_size == 1 else self._over_ranks)(*heads, layout)
        return row_linear(self.linear_proj, out.view(mixed.shape[0], 1, -1))

    def _over_ranks(self, query: Tensor, key: Tensor, value: Tensor, layout: TokenLayout) -> Tensor:
        """Of this rank's tokens, with all ranks' keys and values."""
        group, tokens = self.pg_collection.cp, query.shape[0]
        ranks = dist.get_world_size(group)
        shares = head_shares(query.shape[1], key.shape[1], ranks, dist.get_rank(group))
        if shares is None:
            query, key, value = (to_heads(states, group) for states in (query, key, value))
            return to_tokens(flat_attention(query, key, value, layout), group)
        key, value = spread(torch.cat((key, value), dim=2), shares.keys, group).chunk(2, dim=2)
        query = spread(query, shares.queries, group)
        if len(shares.of) == ranks:
            out = flat_attention(query, key, value, layout)
        else:
            out = part_attention(query, key, value, layout.part(shares.ranges(tokens)))
        return collect(out.view(out.shape[0], max(shares.queries.received), -1), shares.queries, group)

    def after_norm(self, hidden: Tensor, norm: torch.nn.RMSNorm, layout: TokenLayout, cos_sin: Tensor) -> Tensor:
        """hidden + attention of its norm, on one rank, in float32 on CPU."""
        if self.linear_qkv.bias is not None or self.config.context_parallel_size > 1 or not runs_natively(hidden):
            return hidden + self(norm(hidden), layout, cos_sin)
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

    def _head_norm(self) -> Tensor:
        """[R + 1, D]: the queries' norm weight R times, then the key's."""
        width = self.hidden_size_per_attention_head
        return torch.cat(
            (self.q_layernorm.weight.expand(self.queries, width), self.k_layernorm.weight.expand(1, width))
        )


def _pad(tokens: Tensor, grid: Grid) -> Tensor:
    """[tokens, …] → [rows, width, …]; padding repeats a row's last token."""
    return pad(tokens, grid.pad, grid.unpad).view(grid.rows, grid.width, *tokens.shape[1:])


def _unpad(padded: Tensor, grid: Grid) -> Tensor:
    return unpad(padded.flatten(2).flatten(0, 1), grid.unpad)
