"""A teacher's top-k tokens, and the policy's divergence from it, from hidden states."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from nemotron_steps.engine.kernels.linear import linear_forward, outer_product
from nemotron_steps.engine.losses.distillation import TeacherKl
from nemotron_steps.engine.policy.logprob import OutputLayer
from nemotron_steps.engine.policy.token_layout import TokenLayout
from nemotron_steps.engine.types import TrainBatch
from nemotron_steps.errors import EngineError


def linear_topk(
    k: int, hidden: Tensor, weight: Tensor, targets: Tensor, layer: OutputLayer
) -> tuple[Tensor, Tensor, Tensor]:
    """float32 [R] logprobs of targets, [R, k] of the top k, and int32 [R, k] those tokens."""
    weight, total = layer.rows(weight), hidden.shape[0]
    logprobs = torch.empty(total, device=hidden.device)
    topk = torch.empty(total, k, device=hidden.device)
    tokens = torch.empty(total, k, dtype=torch.int32, device=hidden.device)
    for part in layer.chunks(total):
        logits = linear_forward(hidden[part], weight).float()
        lse = layer.log_sum_exp(logits)
        logprobs[part] = layer.at(logits, targets[part, None])[0].squeeze(1) - lse
        if not k:
            continue
        own = logits.topk(min(k, logits.shape[1]), dim=-1)
        values, indices = own.values, own.indices + layer.vocab_start
        if layer.group is not None:
            missing = (0, k - values.shape[1])
            values = layer.gathered(F.pad(values, missing, value=-torch.inf))
            found = values.topk(k, dim=-1)
            values, indices = found.values, layer.gathered(F.pad(indices, missing)).gather(1, found.indices)
        topk[part], tokens[part] = values - lse[:, None], indices.int()
    return logprobs, topk, tokens


def linear_states(hidden: Tensor, weight: Tensor, targets: Tensor, layer: OutputLayer) -> tuple[Tensor, Tensor]:
    """float32 [R] logprobs of the targets, and the states [R, hidden]."""
    return linear_topk(0, hidden, weight, targets, layer)[0], hidden.float()


Comparison = Callable[..., tuple[Tensor, Tensor]]
"""(logits [n, rows], lse [n], entropies [n], what is known of each token, twice, layer) → divergence, its gradient."""


@dataclass(frozen=True)
class TopkTokens:
    """Compares a teacher's top-k tokens, given what `linear_topk` says of them."""

    kl: TeacherKl

    def __call__(
        self, logits: Tensor, lse: Tensor, entropy: Tensor, logprobs: Tensor, tokens: Tensor, layer: OutputLayer
    ) -> tuple[Tensor, Tensor]:
        """See Comparison."""
        chosen, mine, columns = layer.at(logits, tokens)
        value, at_chosen, everywhere = self.kl.of_chosen(chosen, logprobs.log_softmax(-1), lse, -entropy)
        if everywhere is None:
            gradient = torch.zeros_like(logits)
        else:
            log_p = logits - lse[:, None]
            gradient = log_p.exp() * (everywhere[:, None] + (1 - self.kl.forward) * log_p)
        if logits.shape[1]:
            gradient.scatter_add_(1, columns, torch.where(mine, at_chosen, 0.0))
        return value, gradient


@dataclass(frozen=True)
class WholeDistributions:
    """Compares whole distributions, of a teacher's hidden states and number."""

    kl: TeacherKl
    weights: Sequence[Tensor]

    def __call__(
        self, logits: Tensor, lse: Tensor, _: Tensor, given: Tensor, teachers: Tensor, layer: OutputLayer
    ) -> tuple[Tensor, Tensor]:
        """See Comparison."""
        logprobs = torch.zeros_like(logits)
        for number, weight in enumerate(self.weights):
            mine = torch.nonzero(teachers == number).flatten()
            states = given[mine, : weight.shape[1]].to(weight.dtype)
            logprobs[mine] = linear_forward(states, layer.rows(weight)).float()
        return self.kl.of_all(logits - lse[:, None], logprobs - layer.log_sum_exp(logprobs)[:, None], layer.add)


def compared(
    kl: TeacherKl, layout: TokenLayout, micro: TrainBatch, weights: Sequence[Tensor]
) -> tuple[Comparison, Tensor, Tensor]:
    """How a micro-batch is compared, and what its teachers have left of each trained token."""
    if micro.teacher_states is not None and micro.teacher_number is not None:
        numbers = micro.teacher_number[layout.cells // layout.shape[1]]
        return WholeDistributions(kl, weights), micro.teacher_states.flatten(0, 1)[layout.cells], numbers
    if micro.teacher_topk_logprobs is None or micro.teacher_topk_indices is None:
        raise EngineError("no teacher has scored the batch", where="engine/policy/teacher_logprob.py")
    topk, tokens = micro.teacher_topk_logprobs, micro.teacher_topk_indices
    return TopkTokens(kl), topk.flatten(0, 1)[layout.cells], tokens.flatten(0, 1)[layout.cells]


class _LinearDivergence(torch.autograd.Function):
    """float32 [R] nats, with gradients; and without, logprobs of targets and entropies."""

    @staticmethod
    def forward(
        ctx: Any,
        comparison: Comparison,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        first: Tensor,
        second: Tensor,
        layer: OutputLayer,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.comparison, ctx.layer = comparison, layer
        total, own = hidden.shape[0], layer.rows(weight)
        divergence, logprobs, entropy = (torch.empty(total, device=hidden.device) for _ in range(3))
        needs_grad = ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
        direction = torch.empty_like(hidden) if needs_grad else None
        for part in layer.chunks(total):
            found = _chunk(hidden[part], own, targets[part], first[part], second[part], comparison, layer)
            divergence[part], logprobs[part], entropy[part], toward = found
            if direction is not None:
                # As in logprob.py: it does not depend on the loss, so it is formed where the logits are.
                direction[part] = layer.add(linear_forward(toward.to(weight.dtype), own.t()))
        if needs_grad:
            ctx.save_for_backward(hidden, weight, targets, first, second, direction)
        ctx.mark_non_differentiable(logprobs, entropy)
        return divergence, logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, first, second, direction = ctx.saved_tensors
        layer, scale = ctx.layer, grad.to(hidden.dtype)[:, None]
        grad_hidden = direction * scale if ctx.needs_input_grad[1] else None
        grad_weight = None
        if ctx.needs_input_grad[2]:
            own, scaled = layer.rows(weight), hidden * scale
            grad_weight = torch.zeros_like(weight, dtype=torch.float32)
            for part in layer.chunks(hidden.shape[0]):
                found = _chunk(hidden[part], own, targets[part], first[part], second[part], ctx.comparison, layer)
                grad_weight[: own.shape[0]] += outer_product(found[3].to(weight.dtype), scaled[part])
            grad_weight = grad_weight.to(weight.dtype)
        return None, grad_hidden, grad_weight, None, None, None, None


linear_divergence = _LinearDivergence.apply


def _chunk(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    first: Tensor,
    second: Tensor,
    comparison: Comparison,
    layer: OutputLayer,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Divergences, logprobs, entropies [n], and the divergences' gradient in the logits."""
    logits = linear_forward(hidden, weight).float()
    lse = layer.log_sum_exp(logits)
    log_p = logits - lse[:, None]
    entropy = -layer.add((log_p.exp() * log_p).sum(-1))
    value, gradient = comparison(logits, lse, entropy, first, second, layer)
    target = layer.at(logits, targets[:, None])[0].squeeze(1)
    return value, target - lse, entropy, gradient
