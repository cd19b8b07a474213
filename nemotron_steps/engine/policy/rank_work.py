"""One rank's micro-batches of a pass over some rows, each with the layout of its tokens."""

from __future__ import annotations

import dataclasses

import torch

from nemotron_steps.engine.batching import select_rows
from nemotron_steps.engine.policy.moe.replay import check_routed_experts
from nemotron_steps.engine.policy.token_layout import TokenLayout, build_layout
from nemotron_steps.engine.types import TrainBatch
from nemotron_steps.models.architecture import Architecture


class RankWork:
    """This rank's micro-batches of one pass over some rows.

    Past the end of its own it has idle ones: a masked unit of rows, computed only to keep step with other ranks.

    Args:
        own: rows of each of its micro-batches. count: micro-batches with the idle ones. unit: rows of an idle one.
        shares: ranks that divide a micro-batch's tokens. divisible_by: of what its tokens are a multiple.
        ahead: depths of multi-token prediction that look further than the next token.
    """

    def __init__(
        self,
        batch: TrainBatch,
        own: list[list[int]],
        count: int,
        unit: int,
        shares: int,
        divisible_by: int,
        ahead: int,
        architecture: Architecture,
        device: torch.device,
    ) -> None:
        self.count = count
        self._batch, self._own, self._idle_rows = batch, own, list(range(unit))
        self._shares, self._divisible_by, self._ahead = shares, divisible_by, ahead
        self._architecture, self._device = architecture, device
        self._layouts: dict[int, TokenLayout] = {}

    def is_idle(self, number: int) -> bool:
        """Whether a micro-batch only keeps step."""
        return number >= len(self._own)

    def rows(self, number: int) -> list[int]:
        """Of the batch, in a micro-batch."""
        return self._idle_rows if self.is_idle(number) else self._own[number]

    def select(self, number: int) -> TrainBatch:
        """The rows of a micro-batch, as wide as its layout; an idle one's are masked."""
        tokens = dataclasses.replace(self._batch, routed_experts=None)  # of no use to a loss
        micro = select_rows(tokens, self.rows(number), width=self.layout(number).shape[1])
        if self.is_idle(number):
            micro.sample_mask = torch.zeros_like(micro.sample_mask)
        return micro

    def layout(self, number: int) -> TokenLayout:
        """Of a micro-batch's tokens, on the device; made once. EngineError where its experts are not this model's."""
        if number not in self._layouts:
            rows = self.rows(number)
            layout = build_layout(self._batch, rows, divisible_by=self._divisible_by, ahead=self._ahead)
            layout.idle = self.is_idle(number)
            if layout.routed_experts is not None:
                check_routed_experts(layout.routed_experts, self._architecture)
            self._layouts[number] = layout.to(self._device)
        return self._layouts[number]

    def shape(self, number: int) -> tuple[int, ...]:
        """Of the hidden states that pipeline stages exchange."""
        return (self.layout(number).token_ids.shape[0] // self._shares, 1, self._architecture.hidden_size)
