"""Multi-token prediction: blocks after the last layer that predict tokens further on (DeepSeek-V3, arXiv 2412.19437).

    h_i^k    = block(eh_proj · [enorm(embedding of t_{i+k}), hnorm(h_i^{k−1})])
    loss_k   = − mean over trained tokens of log p(t_{i+k+1} | output_layer · h_i^k)
    gradient of    mtp_loss_scaling_factor / depths · Σ_k loss_k    is added to that of the policy's own loss

h^0 are the model's last states, after the last norm. The means are over the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from nemotron_steps.engine.kernels.linear import linear
from nemotron_steps.engine.losses.loss import loss_mask
from nemotron_steps.engine.policy.distributed.parallel_dims import Groups, device
from nemotron_steps.engine.policy.layers import RmsNorm
from nemotron_steps.engine.policy.logprob import Results
from nemotron_steps.engine.types import TrainBatch

if TYPE_CHECKING:
    from nemotron_steps.config.schema.policy import MegatronConfig
    from nemotron_steps.engine.policy.token_layout import TokenLayout


class PredictionBlock(torch.nn.Module):
    """One block, under megatron-core's names."""

    def __init__(self, config: Any, layers: Sequence[torch.nn.Module]) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.layernorm_epsilon
        self.enorm, self.hnorm = RmsNorm(config, width, eps), RmsNorm(config, width, eps)
        # Every tensor-parallel rank has all of it: next to the layers it is little.
        self.eh_proj = torch.nn.Linear(2 * width, width, bias=False, device=device(), dtype=config.params_dtype)
        self.mtp_model_layer = torch.nn.Module()
        self.mtp_model_layer.layers = torch.nn.ModuleList(layers)
        self.final_layernorm = RmsNorm(config, width, eps)

    def forward(self, hidden: Tensor, embedded: Tensor, layout: TokenLayout, angles: Tensor) -> Tensor:
        """States of the depth before and embeddings of the tokens ahead → states of this depth."""
        states = linear(torch.cat((self.enorm(embedded), self.hnorm(hidden)), dim=-1), self.eh_proj.weight)
        added: Tensor | None = None
        for layer in self.inner_layers():
            states, added = layer(states, added, layout, angles)
        return self.final_layernorm.after_adding(states, added)[1]

    def inner_layers(self) -> Iterator[Any]:
        """Its layers of the hybrid pattern."""
        yield from self.mtp_model_layer.layers  # type: ignore[misc]


class MultiTokenPrediction(torch.nn.Module):
    """One block for each depth, or one for all; `detach`: the model gets no gradient."""

    def __init__(self, blocks: Sequence[PredictionBlock], *, detach: bool) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(blocks)
        self.detach = detach

    def inner_layers(self) -> Iterator[Any]:
        """The layers of all blocks."""
        for block in self.layers:
            assert isinstance(block, PredictionBlock)
            yield from block.inner_layers()

    def forward(
        self,
        hidden: Tensor,
        embed: Callable[[Tensor], Tensor],
        layout: TokenLayout,
        angles: Tensor,
        *,
        run: Callable[..., Tensor],
    ) -> Iterator[Tensor]:
        """States [T, 1, hidden] of each depth, from those after the last norm."""
        if self.detach:
            hidden = hidden.detach()
        for depth, ahead in enumerate(layout.ahead):
            embedded = embed(ahead.token_ids)
            if self.detach:
                embedded = embedded.detach()
            block = self.layers[depth % len(self.layers)]
            hidden = run(block, hidden, embedded, layout, angles)
            yield hidden


class PredictionLoss:
    """The loss of every depth over one global batch, summed over micro-batches."""

    def __init__(self, batch: TrainBatch, config: MegatronConfig, on: torch.device) -> None:
        mask = loss_mask(batch.token_mask, batch.sample_mask)
        depths = range(1, config.mtp_num_layers + 1)
        self._counts = [float(mask[:, depth + 1 :].sum(dtype=torch.float64)) for depth in depths]
        self._scale = config.mtp_loss_scaling_factor / len(self._counts)
        self._sums = torch.zeros(2, len(self._counts), dtype=torch.float64, device=on)

    def __call__(self, predicted: Sequence[Results], layout: TokenLayout, micro: TrainBatch) -> Tensor:
        """This micro-batch's share of the loss, of `linear_predictions` of each depth."""
        mask = loss_mask(micro.token_mask, micro.sample_mask).flatten()
        losses, taken = [], []
        for (logprobs, hits), ahead, count in zip(predicted, layout.ahead, self._counts, strict=True):
            weights = mask[ahead.cells]
            losses.append(-torch.where(weights > 0, logprobs * weights, 0.0).sum() / max(count, 1.0))
            taken.append((hits * weights).sum() / max(count, 1.0))
        by_depth = torch.stack(losses)
        self._sums += torch.stack((by_depth.detach(), torch.stack(taken)))
        return self._scale * by_depth.sum()

    def metrics(self, groups: Groups) -> dict[str, float]:
        """Of every depth: its loss, and in percent how many tokens would be accepted."""
        if groups.data_size > 1:
            dist.all_reduce(self._sums, group=groups.data)
        found: dict[str, float] = {}
        for depth, (loss, taken, count) in enumerate(zip(*self._sums.tolist(), self._counts, strict=True), start=1):
            if count:
                found |= {f"mtp_{depth}_loss": loss, f"mtp_{depth}_acceptance_rate": 100 * taken}
        return found
