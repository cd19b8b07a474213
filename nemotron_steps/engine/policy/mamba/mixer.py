"""The Mamba-2 mixer over flat tokens, on megatron-core's tensor-parallel linears.

    z, x, B, C, dt = in_proj u
    x, B, C = silu(conv(x, B, C))
    y = scan(x, softplus(dt + dt_bias), −exp(A_log), B, C, D)
    out = out_proj norm(y · silu(z))

Under tensor parallelism a rank has its share of every part; under context parallelism x, B, C and dt are exchanged for
heads before the convolution. The gate and the norm stay with the tokens, so norms may span heads of several ranks.
"""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from nemotron_steps.engine.policy.distributed.context_parallel import Exchange, spread, to_tokens
from nemotron_steps.engine.policy.distributed.parallel_dims import device
from nemotron_steps.engine.policy.layers import column_linear, row_linear
from nemotron_steps.engine.policy.mamba.libraries import library_for
from nemotron_steps.engine.policy.mamba.scan import Runs, conv, scan, time_steps
from nemotron_steps.engine.policy.token_layout import Range, TokenLayout
from nemotron_steps.models.architecture import Architecture
from nemotron_steps.models.megatron_core import load_megatron_core

load_megatron_core()

from megatron.core import parallel_state  # noqa: E402
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear  # noqa: E402


def gated_norm(y: Tensor, gate: Tensor, weight: Tensor, groups: int, eps: float) -> Tensor:
    """Gate y [T, W], then norm each of its groups."""
    run = library_for("norm", y, _GatedNorm.apply, y.shape[1], groups) or _GatedNorm.apply
    return run(y, gate, weight, groups, eps)


class _GatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, gate: Tensor, weight: Tensor, groups: int, eps: float) -> Tensor:
        opened = (y.float() * F.silu(gate.float())).view(-1, groups, y.shape[1] // groups)
        scale = torch.linalg.vecdot(opened, opened).div_(opened.shape[-1]).add_(eps).rsqrt_().unsqueeze(-1)
        ctx.save_for_backward(y, gate, weight, scale)
        return (opened.mul_(scale).flatten(1) * weight.float()).to(y.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        y, gate, weight, scale = ctx.saved_tensors
        shape = (*scale.shape[:2], -1)
        values, gate32, grad = y.float(), gate.float(), grad.float()
        opened = F.silu(gate32)
        unit = (values * opened).view(shape).mul_(scale)
        grad_weight = (grad * unit.flatten(1)).sum(0)
        grads = (grad * weight.float()).view(shape)
        along = torch.linalg.vecdot(grads, unit).div_(unit.shape[-1]).unsqueeze(-1)
        grads = grads.addcmul_(unit, along, value=-1.0).mul_(scale).flatten(1)
        grad_gate = torch.ops.aten.silu_backward(grads * values, gate32)
        return grads.mul_(opened).to(y.dtype), grad_gate.to(gate.dtype), grad_weight.to(weight.dtype), None, None


class MambaMixer(torch.nn.Module):
    """One Mamba-2 mixer; this tensor-parallel rank's share of it."""

    def __init__(self, config: Any, architecture: Architecture) -> None:
        super().__init__()
        sizes = architecture.mamba
        assert sizes is not None
        ranks = parallel_state.get_tensor_model_parallel_group()
        self.heads, self.head_dim = sizes.num_heads // ranks.size(), sizes.head_dim
        self.groups, self.state = sizes.num_groups // ranks.size(), sizes.state_size
        self.inner, self.kernel, self.chunk_size = self.heads * self.head_dim, sizes.conv_kernel, sizes.chunk_size
        self.time_step_limit, self.eps = sizes.time_step_limit, architecture.norm_eps
        settings: dict[str, Any] = {"config": config, "bias": False, "skip_bias_add": True, "tp_group": ranks}
        self.in_proj = ColumnParallelLinear(
            config.hidden_size, sizes.in_proj_rows, init_method=config.init_method, gather_output=False, **settings
        )
        channels = self.inner + 2 * self.groups * self.state
        self.conv1d = _Weights((channels, 1, self.kernel), config.params_dtype, bias=sizes.conv_bias)
        self.dt_bias, self.A_log, self.D = (_parameter((self.heads,), torch.float32) for _ in range(3))
        self.norm = _Weights((self.inner,), config.params_dtype)
        self.out_proj = RowParallelLinear(
            sizes.inner_size,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            **settings,
        )
        self.context = parallel_state.get_context_parallel_group() if config.context_parallel_size > 1 else None

    def forward(self, normed: Tensor, layout: TokenLayout, *_: Any) -> Tensor:
        """Mix the tokens of each row: [T, 1, hidden], or this rank's share of T → the same shape."""
        mixed = column_linear(self.in_proj, normed).flatten(0, 1)
        gate, rest = torch.split(mixed, [self.inner, mixed.shape[1] - self.inner], dim=1)
        if self.context is None:
            y = self._recur(rest, layout, 0, 1)
        else:
            rank, ranks = self.context.rank(), self.context.size()
            exchange = head_exchange(self.heads, self.head_dim, self.groups, self.state, rank, ranks)
            y = to_tokens(self._recur(spread(rest, exchange, self.context), layout, rank, ranks), self.context)
        return row_linear(self.out_proj, gated_norm(y, gate, self.norm.weight, self.groups, self.eps)[:, None])

    def _recur(self, rest: Tensor, layout: TokenLayout, rank: int, ranks: int) -> Tensor:
        if layout.runs is None:  # once for all layers
            layout.runs = Runs(
                layout.lengths.numpy(),
                np.repeat(np.arange(layout.whole.rows), np.diff(layout.first_suffix.numpy())),
                padding=layout.padding,
                device=layout.token_ids.device,
            )
        runs = layout.runs
        weight: Tensor = self.conv1d.weight
        bias: Tensor | None = self.conv1d.bias
        dt_bias, a_log, d = (tensor.view(-1) for tensor in (self.dt_bias, self.A_log, self.D))
        heads, groups = self.heads // ranks, -(-self.groups // ranks)
        if ranks > 1:
            # What the other ranks have of these gets its gradients there, and gradients add up over the ranks.
            *convolved, own = head_ranges(self.heads, self.head_dim, self.groups, self.state, rank, ranks)
            weight = torch.cat([weight[first:after] for first, after in convolved])
            bias = None if bias is None else torch.cat([bias[first:after] for first, after in convolved])
            before = self.conv1d.weight.shape[0]
            dt_bias, a_log, d = (tensor[own[0] - before : own[1] - before] for tensor in (dt_bias, a_log, d))
        states, dt = torch.split(rest, [weight.shape[0], heads], dim=1)
        sizes = [heads * self.head_dim, groups * self.state, groups * self.state]
        parts = torch.split(conv(states, weight, bias, runs), sizes, dim=1)
        x, b, c = (
            part.view(part.shape[0], count, -1) for part, count in zip(parts, (heads, groups, groups), strict=True)
        )
        steps = time_steps(dt, dt_bias, self.time_step_limit)
        return scan(x, steps, -a_log.exp(), b, c, d, runs, self.chunk_size)[0].flatten(1)


def head_ranges(heads: int, head_dim: int, groups: int, state: int, rank: int, ranks: int) -> tuple[Range, ...]:
    """Where the heads of one rank are among the columns x, B, C, dt."""
    inner, each = heads * head_dim, heads // ranks
    first, after = rank * groups // ranks, -(-(rank + 1) * groups // ranks)
    before = inner + 2 * groups * state
    return (
        (rank * each * head_dim, (rank + 1) * each * head_dim),
        (inner + first * state, inner + after * state),
        (inner + (groups + first) * state, inner + (groups + after) * state),
        (before + rank * each, before + (rank + 1) * each),
    )


def head_exchange(heads: int, head_dim: int, groups: int, state: int, rank: int, ranks: int) -> Exchange:
    """From all columns of this rank's tokens to its own heads' columns of all tokens."""
    sent = tuple(head_ranges(heads, head_dim, groups, state, other, ranks) for other in range(ranks))
    wanted = sum(after - first for first, after in sent[rank])
    return Exchange(sent[0][-1][0] + heads, sent, (wanted,) * ranks, along=0)


class _Weights(torch.nn.Module):
    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = _parameter(shape, dtype)
        self.bias = _parameter(shape[:1], dtype) if bias else None


def _parameter(shape: tuple[int, ...], dtype: torch.dtype) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.empty(shape, dtype=dtype, device=device()))
