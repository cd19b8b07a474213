"""Where a policy's output layer lies, and which of its ranks computes what of a micro-batch's tokens there.

What is computed is logprob.py's and teacher_logprob.py's: functions of states, this rank's rows of the layer, and
what else is known of each token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F

from nemotron_steps.engine.policy.context_parallel import sum_parts
from nemotron_steps.engine.policy.kernels.dense import row_multiple
from nemotron_steps.engine.policy.parallel_dims import Groups
from nemotron_steps.engine.policy.token_layout import TokenLayout

Results = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class OutputLayer:
    """The vocabulary that a rank's rows of an output layer are of."""

    chunk: int
    """Tokens whose logits exist at once."""
    vocab_size: int
    """Of the whole model, without padding."""
    vocab_start: int = 0
    """Token id of this rank's first row."""
    group: dist.ProcessGroup | None = None
    """Ranks that hold the other rows; None when this rank holds all."""

    def rows(self, weight: torch.Tensor) -> torch.Tensor:
        """This rank's rows that stand for tokens: padded ones have no probability."""
        return weight[: max(0, min(weight.shape[0], self.vocab_size - self.vocab_start))]

    def add(self, values: torch.Tensor) -> torch.Tensor:
        """Sum over the group, in place."""
        if self.group is not None:
            dist.all_reduce(values, group=self.group)
        return values

    def log_sum_exp(self, logits: torch.Tensor) -> torch.Tensor:
        """[n, rows] of this rank → [n] over the whole vocabulary."""
        if self.group is None:
            return logits.logsumexp(-1)
        highest = logits.amax(-1) if logits.shape[1] else logits.new_full((len(logits),), -torch.inf)
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=self.group)
        return self.add((logits - highest[:, None]).exp().sum(-1)).log_().add_(highest)

    def at(self, logits: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Logits [n, k] of some tokens [n, k], wherever they are; and which are this rank's, at which columns."""
        columns = tokens.long() - self.vocab_start
        mine = (columns >= 0) & (columns < logits.shape[1])
        columns = torch.where(mine, columns, 0)
        if not logits.shape[1]:
            return self.add(logits.new_zeros(tokens.shape)), mine, columns
        return self.add(torch.where(mine, logits.gather(1, columns), 0.0)), mine, columns


@dataclass(frozen=True)
class TokenOutputs:
    """Applies functions of the output layer to tokens of a micro-batch, on the ranks that have them.

    Args:
        groups: of this rank; `context` of them share the tokens.
        chunk: tokens whose logits exist at once.
        vocab_size: of the whole model, without padding.
    """

    groups: Groups
    context: int
    chunk: int
    vocab_size: int

    def __call__(
        self,
        of: Callable[..., Results],
        select: Callable[[torch.Tensor], torch.Tensor],
        weight: torch.Tensor,
        layout: TokenLayout,
        source: torch.Tensor,
        *given: torch.Tensor,
    ) -> Results:
        """Results of R tokens, [R, ...] each; only the first has a gradient.

        Args:
            of: (states, weight, *given, layer) to results.
            select: positions among this rank's tokens to the states there.
            weight: this rank's rows of the output layer.
            source: flat token of all ranks whose state predicts each target.
            given: [R, ...] each, what else `of` is told of each token.
        """
        if self.context == 1:
            return self._here(of, select, weight, source, *given)
        share = layout.token_ids.shape[0] // self.context
        first = self.groups.context_rank * share
        mine = torch.nonzero((source >= first) & (source < first + share)).flatten()
        parts = self._here(of, select, weight, source[mine] - first, *(each[mine] for each in given))
        whole = (part.new_zeros(source.shape[0], *part.shape[1:]).index_copy(0, mine, part) for part in parts)
        result, *further = (sum_parts(values, self.groups.context) for values in whole)
        return (result, *(each.detach() for each in further))

    def _here(
        self,
        of: Callable[..., Results],
        select: Callable[[torch.Tensor], torch.Tensor],
        weight: torch.Tensor,
        source: torch.Tensor,
        *given: torch.Tensor,
    ) -> Results:
        rows = source.shape[0]
        extra = -rows % row_multiple(weight.device, weight.dtype)
        if extra:
            source, *given_rows = (F.pad(each, (0, 0) * (each.dim() - 1) + (0, extra)) for each in (source, *given))
            given = tuple(given_rows)
        start = self.groups.tensor_rank * weight.shape[0]
        group = self.groups.tensor if self.groups.tensor_size > 1 else None
        layer = OutputLayer(self.chunk, self.vocab_size, start, group)
        return tuple(result[:rows] for result in of(select(source), weight, *given, layer))
