"""A teacher's heaviest tokens, and the policy's divergence from them, straight from hidden states.

As logprob.py: the output layer goes over chunks of tokens, so that [chunk, vocabulary] logits are all that ever exist;
of a teacher k logprobs a token are kept. Weights may be vocabulary-parallel.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from nemotron_steps.engine.losses.teacher_kl import TeacherKl
from nemotron_steps.engine.policy.kernels.dense import linear_forward, outer_product
from nemotron_steps.engine.policy.output_layer import OutputLayer


def linear_topk(
    k: int, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, layer: OutputLayer
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What a teacher says of each token, without gradient.

    Args:
        k: tokens to keep of the whole vocabulary.
        hidden: [R, hidden].
        weight: [V, hidden], this rank's rows of the output layer.
        targets: int64 [R], the tokens that were sampled.

    Returns:
        float32 [R] logprobs of the targets; float32 [R, k] logprobs of the k heaviest tokens, heaviest first, and
        int32 [R, k] those tokens.
    """
    weight, total = layer.rows(weight), hidden.shape[0]
    logprobs = torch.empty(total, device=hidden.device)
    heaviest = torch.empty(total, k, device=hidden.device)
    tokens = torch.empty(total, k, dtype=torch.int32, device=hidden.device)
    for start in range(0, total, layer.chunk):
        part = slice(start, min(start + layer.chunk, total))
        logits = linear_forward(hidden[part], weight).float()
        lse = layer.log_sum_exp(logits)
        logprobs[part] = layer.at(logits, targets[part, None])[0].squeeze(1) - lse
        own = logits.topk(min(k, logits.shape[1]), dim=-1)
        values, indices = own.values, own.indices + layer.vocab_start
        if layer.group is not None:
            values, indices = _of_all_ranks(values, indices, k, layer.group)
        heaviest[part], tokens[part] = values - lse[:, None], indices.int()
    return logprobs, heaviest, tokens


def _of_all_ranks(
    values: torch.Tensor, indices: torch.Tensor, k: int, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """The k heaviest of what every rank found among its columns."""
    missing = (0, k - values.shape[1])
    values = torch.nn.functional.pad(values, missing, value=-torch.inf).contiguous()
    indices = torch.nn.functional.pad(indices, missing).contiguous()
    ranks = dist.get_world_size(group)
    all_values, all_indices = ([torch.empty_like(part) for _ in range(ranks)] for part in (values, indices))
    dist.all_gather(all_values, values, group=group)
    dist.all_gather(all_indices, indices, group=group)
    found = torch.cat(all_values, dim=1).topk(k, dim=-1)
    return found.values, torch.cat(all_indices, dim=1).gather(1, found.indices)


def linear_divergence(
    kl: TeacherKl,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    teacher_logprobs: torch.Tensor,
    teacher_tokens: torch.Tensor,
    layer: OutputLayer,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The policy's divergence from a teacher, with gradients to hidden and weight.

    Args:
        kl: which divergence.
        hidden: [R, hidden]; under a group, the same on every rank.
        weight: [V, hidden], this rank's rows of the output layer.
        targets: int64 [R], the tokens that were sampled.
        teacher_logprobs: float32 [R, k], as `linear_topk` gives them.
        teacher_tokens: int32 [R, k].

    Returns:
        float32 [R] nats; and without gradient float32 [R] logprobs of the targets and [R] entropies.
    """
    result: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = _LinearDivergence.apply(  # type: ignore[no-untyped-call]
        hidden, weight, targets, teacher_logprobs, teacher_tokens, kl, layer
    )
    return result


class _LinearDivergence(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        teacher_logprobs: torch.Tensor,
        teacher_tokens: torch.Tensor,
        kl: TeacherKl,
        layer: OutputLayer,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        ctx.kl, ctx.layer = kl, layer
        total, own = hidden.shape[0], layer.rows(weight)
        divergence, logprobs, entropy = (torch.empty(total, device=hidden.device) for _ in range(3))
        needs_grad = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        direction = torch.empty_like(hidden) if needs_grad else None
        for start in range(0, total, layer.chunk):
            part = slice(start, min(start + layer.chunk, total))
            found = _chunk(hidden[part], own, targets[part], teacher_logprobs[part], teacher_tokens[part], kl, layer)
            divergence[part], logprobs[part], entropy[part], toward = found
            if direction is not None:
                # As in logprob.py: it does not depend on the loss, so it is formed where the logits are.
                direction[part] = layer.add(linear_forward(toward.to(weight.dtype), own.t()))
        if needs_grad:
            ctx.save_for_backward(hidden, weight, targets, teacher_logprobs, teacher_tokens, direction)
        ctx.mark_non_differentiable(logprobs, entropy)
        return divergence, logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor, *_: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        hidden, weight, targets, teacher_logprobs, teacher_tokens, direction = ctx.saved_tensors
        layer, scale = ctx.layer, grad.to(hidden.dtype)[:, None]
        grad_hidden = direction * scale if ctx.needs_input_grad[0] else None
        grad_weight = None
        if ctx.needs_input_grad[1]:
            own, scaled = layer.rows(weight), hidden * scale
            grad_weight = torch.zeros_like(weight, dtype=torch.float32)
            for start in range(0, hidden.shape[0], layer.chunk):
                part = slice(start, min(start + layer.chunk, hidden.shape[0]))
                given = (hidden[part], own, targets[part], teacher_logprobs[part], teacher_tokens[part])
                toward = _chunk(*given, ctx.kl, layer)[3]
                grad_weight[: own.shape[0]] += outer_product(toward.to(weight.dtype), scaled[part])
            grad_weight = grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, None, None, None, None, None


def _chunk(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    teacher_logprobs: torch.Tensor,
    teacher_tokens: torch.Tensor,
    kl: TeacherKl,
    layer: OutputLayer,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Divergences, logprobs and entropies [n] of some tokens, and the divergences' gradient in this rank's logits."""
    logits = linear_forward(hidden, weight).float()
    lse = layer.log_sum_exp(logits)
    log_p = logits - lse[:, None]
    p = log_p.exp()
    negative_entropy = layer.add((p * log_p).sum(-1))
    chosen, mine, columns = layer.at(logits, teacher_tokens)
    value, at_chosen, everywhere = kl.of_chosen(chosen, teacher_logprobs.log_softmax(-1), lse, negative_entropy)
    if everywhere is None:
        gradient = torch.zeros_like(logits)
    else:
        gradient = p * (everywhere[:, None] + (1 - kl.forward) * log_p)
    if logits.shape[1]:
        gradient.scatter_add_(1, columns, torch.where(mine, at_chosen, 0.0))
    target = layer.at(logits, targets[:, None])[0].squeeze(1)
    return value, target - lse, -negative_entropy, gradient
