"""Logprobs of chosen tokens straight from hidden states, without ever holding logits of the whole batch. Output layer,
log-softmax and gather are one autograd function over chunks of tokens. With p = softmax(W h) and r = onehot(target) −
p, d lp/d h = Wᵀ r does not depend on the loss, so it is formed in the forward pass, where it also gives the entropy, H
= h · Wᵀ r − lp. r is formed in float32 and then rounded, never as a difference of rounded products: of a token that the
policy is sure of, W_target − Wᵀ p would be nothing but rounding."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from nemotron_steps.engine.kernels.fused import linear_forward, outer_product
from nemotron_steps.engine.losses.distillation import TeacherKl
from nemotron_steps.engine.losses.loss import SampledFrom
from nemotron_steps.engine.policy.token_layout import TokenLayout
from nemotron_steps.engine.types import TrainBatch
from nemotron_steps.errors import EngineError

Results = tuple[Tensor, ...]


@dataclass(frozen=True)
class OutputLayer:
    """The vocabulary that a rank's rows of an output layer are of."""

    chunk: int  # tokens whose logits exist at once
    vocab_size: int  # of the whole model, without padding
    vocab_start: int = 0  # token id of this rank's first row
    group: dist.ProcessGroup | None = None  # ranks that hold the other rows

    def rows(self, weight: Tensor) -> Tensor:
        """This rank's rows that stand for tokens: padded ones have no probability."""
        return weight[: max(0, min(weight.shape[0], self.vocab_size - self.vocab_start))]

    def chunks(self, total: int) -> Iterator[slice]:
        """Of so many tokens."""
        return (slice(start, min(start + self.chunk, total)) for start in range(0, total, self.chunk))

    def gathered(self, values: Tensor) -> Tensor:
        """[n, k] of every rank of the group, side by side."""
        parts = [torch.empty_like(values) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(parts, values.contiguous(), group=self.group)
        return torch.cat(parts, dim=1)

    def add(self, values: Tensor) -> Tensor:
        """Sum over the group, in place."""
        if self.group is not None:
            dist.all_reduce(values, group=self.group)
        return values

    def largest(self, values: Tensor) -> Tensor:
        """Of the group."""
        highest = values.clone()
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=self.group)
        return highest

    def log_sum_exp(self, logits: Tensor) -> Tensor:
        """[n, rows] of this rank → [n] over the whole vocabulary."""
        if self.group is None:
            return logits.logsumexp(-1)
        highest = self.largest(logits.amax(-1) if logits.shape[1] else logits.new_full((len(logits),), -torch.inf))
        return self.add((logits - highest[:, None]).exp().sum(-1)).log_().add_(highest)

    def at(self, logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits [n, k] of some tokens [n, k], wherever they are; and which are this rank's, at which columns."""
        columns = tokens.long() - self.vocab_start
        mine = (columns >= 0) & (columns < logits.shape[1])
        columns = torch.where(mine, columns, 0)
        if not logits.shape[1]:
            return self.add(logits.new_zeros(tokens.shape)), mine, columns
        return self.add(torch.where(mine, logits.gather(1, columns), 0.0)), mine, columns


KEPT_RESIDUAL_BYTES = 64 * 2**20
"""Residuals up to this size are kept for the backward pass; others are computed again."""

NOT_HERE = -1
"""Column of a target that another rank holds."""


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    layer: OutputLayer,
    *,
    with_entropy: bool = True,
    sampled_from: SampledFrom = SampledFrom(),  # noqa: B008  (frozen)
) -> tuple[Tensor, Tensor]:
    """float32 [R] logprobs of `targets` under softmax(hidden Wᵀ / temperature), with gradients; [R] entropies. Under
    top_p or top_k the softmax is over the tokens they keep, ties with the lightest of them included; others have -inf
    and no gradient. Without gradients entropies take extra work: `with_entropy` False leaves them at 0."""
    if sampled_from.temperature != 1.0:
        hidden = hidden / sampled_from.temperature  # as good as dividing the logits, of which there are many more
    truncation = sampled_from if sampled_from.truncated else None
    logprobs, entropy, _ = _LinearLogprobs.apply(hidden, weight, targets, layer, with_entropy, truncation, False)
    return logprobs, entropy


def linear_predictions(hidden: Tensor, weight: Tensor, targets: Tensor, layer: OutputLayer) -> tuple[Tensor, Tensor]:
    """Logprobs of `targets` under the whole softmax, and 1.0 [R] where the target is what `argmax` finds."""
    logprobs, _, hits = _LinearLogprobs.apply(hidden, weight, targets, layer, False, None, True)
    return logprobs, hits


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        layer: OutputLayer,
        with_entropy: bool,
        truncation: SampledFrom | None,
        with_hits: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        total, width = hidden.shape[0], weight.shape[0]
        rows = layer.rows(weight).shape[0]
        ctx.padding, ctx.layer = width - rows, layer
        weight = weight[:rows] if ctx.padding else weight
        needs_grad = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        logprobs = torch.empty(total, dtype=torch.float32, device=hidden.device)
        entropy, hits = torch.zeros_like(logprobs), torch.zeros_like(logprobs)
        normalizer = torch.empty(2, total, dtype=torch.float32, device=hidden.device)
        direction = torch.empty_like(hidden) if needs_grad else None
        ctx.keep = needs_grad and total * rows * weight.element_size() <= KEPT_RESIDUAL_BYTES
        kept: list[Tensor] = []
        local = targets - layer.vocab_start
        if layer.group is not None:
            local = torch.where((local >= 0) & (local < rows), local, NOT_HERE)
        lightest = None if truncation is None else torch.empty_like(logprobs)
        for part in layer.chunks(total):
            logits = linear_forward(hidden[part], weight)
            if with_hits:
                hits[part] = _hits(logits, local[part], layer)
            if truncation is not None and lightest is not None:
                lightest[part] = _lightest_kept(logits, truncation, layer, width)
                _leave_out(logits, lightest[part])
            highest, log_mass, chosen = _normalize(logits, local[part], layer)
            if lightest is None:
                torch.sub(chosen - highest, log_mass, out=logprobs[part])
                anchor = logprobs[part]
            else:
                kept_target = chosen >= lightest[part]
                local[part] = torch.where(kept_target, local[part], NOT_HERE)
                logprobs[part] = torch.where(kept_target, chosen - highest - log_mass, -torch.inf)
                anchor = torch.where(kept_target, chosen, 0.0) - highest - log_mass
            normalizer[0, part], normalizer[1, part] = highest, log_mass
            if not (needs_grad or with_entropy):
                continue
            residuals = _residuals(logits, highest, log_mass, local[part])
            toward = layer.add(linear_forward(residuals, weight.t()))
            torch.sub((toward * hidden[part]).sum(-1, dtype=torch.float32), anchor, out=entropy[part])
            if direction is not None:
                direction[part] = toward
            if ctx.keep:
                kept.append(residuals)
        if needs_grad:
            ctx.save_for_backward(hidden, weight, local, normalizer, direction, lightest, *kept)
        ctx.mark_non_differentiable(entropy, hits)
        return logprobs, entropy, hits

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, local, normalizer, direction, lightest, *kept = ctx.saved_tensors
        scale = grad.to(hidden.dtype)[:, None]
        grad_hidden = direction * scale if ctx.needs_input_grad[0] else None
        grad_weight = None
        if ctx.needs_input_grad[1]:
            scaled = hidden * scale
            grad_weight = torch.zeros_like(weight, dtype=torch.float32)
            for number, part in enumerate(ctx.layer.chunks(hidden.shape[0])):
                if ctx.keep:
                    residuals = kept[number]
                else:
                    logits = linear_forward(hidden[part], weight)
                    if lightest is not None:
                        _leave_out(logits, lightest[part])
                    residuals = _residuals(logits, normalizer[0, part], normalizer[1, part], local[part])
                grad_weight += outer_product(residuals, scaled[part])
            grad_weight = grad_weight.to(weight.dtype)
            if ctx.padding:
                grad_weight = F.pad(grad_weight, (0, 0, 0, ctx.padding))
        return grad_hidden, grad_weight, None, None, None, None, None


def _normalize(logits: Tensor, local: Tensor, layer: OutputLayer) -> tuple[Tensor, Tensor, Tensor]:
    """Over the whole vocabulary, float32 [n]: the largest logit, log Σ exp(logit − largest), the target's logit. The
    first two are never added: of a token with p near 1, what 1 − p is would be lost to rounding."""
    column = local if layer.group is None else local.clamp(min=0)
    if logits.is_cuda and logits.dtype is not torch.float32:
        from nemotron_steps.engine.kernels.triton_kernels import softmax_statistics

        largest, mass, chosen = softmax_statistics(logits, column)
    else:
        logits = logits.float()
        chosen = logits.gather(1, column[:, None]).squeeze(1)
        largest = logits.amax(-1)
        mass = (logits - largest[:, None]).exp_().sum(-1)
    if layer.group is None:
        return largest, mass.log_(), chosen
    highest = layer.largest(largest)
    sums = layer.add(torch.stack((mass * (largest - highest).exp_(), chosen.masked_fill(local == NOT_HERE, 0.0))))
    return highest, sums[0].log_(), sums[1]


def _hits(logits: Tensor, local: Tensor, layer: OutputLayer) -> Tensor:
    """float32 [n], 1 where the target has the largest logit; of ranks with equal ones, the first has the larger."""
    largest, column = logits.max(-1)
    hits = column == local
    if layer.group is None:
        return hits.float()
    rank = dist.get_rank(layer.group)
    first = torch.where(largest == layer.largest(largest), rank, dist.get_world_size(layer.group))
    dist.all_reduce(first, op=dist.ReduceOp.MIN, group=layer.group)
    return layer.add((hits & (first == rank)).float())


def _lightest_kept(logits: Tensor, truncation: SampledFrom, layer: OutputLayer, width: int) -> Tensor:
    """float32 [n] smallest logit that top_k and then top_p keep; `width`: columns of every rank."""
    values = logits.float()
    if layer.group is not None:
        values = layer.gathered(F.pad(values, (0, width - values.shape[1]), value=-torch.inf))
    count = truncation.top_k if 0 < truncation.top_k < values.shape[1] else values.shape[1]
    largest = values.topk(count, dim=-1).values
    if truncation.top_p >= 1:
        return largest[:, -1]
    shares = largest.softmax(-1, dtype=torch.float64)
    before = shares.cumsum(-1) - shares
    return largest.gather(1, (before < truncation.top_p).sum(-1, keepdim=True) - 1).squeeze(1)


def _leave_out(logits: Tensor, lightest: Tensor) -> None:
    """Give logits below `lightest` no probability, in place."""
    # Not -inf, whose difference with itself is NaN where a whole block of columns is left out.
    logits.masked_fill_(logits < lightest[:, None], torch.finfo(logits.dtype).min / 2)


def _residuals(logits: Tensor, highest: Tensor, log_mass: Tensor, local: Tensor) -> Tensor:
    """onehot(local) − exp(logits − highest − log_mass), formed in float32; may overwrite the logits."""
    if logits.is_cuda and logits.dtype is not torch.float32:
        from nemotron_steps.engine.kernels.triton_kernels import to_residuals

        return to_residuals(logits, highest, log_mass, local)
    residuals = logits.float().sub_(highest[:, None]).sub_(log_mass[:, None]).exp_().neg_()
    residuals.scatter_add_(1, local.clamp(min=0)[:, None], (local != NOT_HERE).to(residuals.dtype)[:, None])
    return residuals.to(logits.dtype)


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
        raise EngineError("no teacher has scored the batch", where="engine/policy/logprob.py")
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
                # It does not depend on the loss, so it is formed where the logits are.
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
