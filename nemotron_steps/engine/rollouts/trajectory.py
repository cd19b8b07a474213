"""A rollout's tokens while it goes on: which of them the policy sampled, under which weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from nemotron_steps.engine.rollouts.failures import Failure
from nemotron_steps.engine.types import Completion, FinishReason


@dataclass
class Trajectory:
    """One rollout's tokens so far, and what it said."""

    token_ids: list[int]
    token_mask: list[int]
    logprobs: list[float]
    weight_versions: list[int] = field(default_factory=list)
    turns: list[tuple[int, int]] = field(default_factory=list)
    output: list[dict[str, Any]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    truncated: bool = False
    malformed_tool_calls: int = 0
    failure: Failure | None = None
    """Why it did not get to its end."""
    routed_experts: npt.NDArray[np.int16] | None = None
    """As a Rollout's."""

    def append_sampled(self, completion: Completion) -> None:
        """Add an assistant turn as it was sampled."""
        start = len(self.token_ids)
        self.token_ids.extend(completion.token_ids)
        self.token_mask.extend([1] * len(completion.token_ids))
        self.logprobs.extend(completion.logprobs)
        self.weight_versions.extend(completion.weight_versions)
        self.turns.append((start, len(self.token_ids)))
        self.truncated = completion.finish_reason is not FinishReason.STOP
        self._add_experts(completion.routed_experts)

    def _add_experts(self, chosen: npt.NDArray[np.int16] | None) -> None:
        """Those of tokens that had none: a turn feeds the turns before it again, under other weights perhaps."""
        if chosen is not None:
            known = self.routed_experts
            # Copied: what came from another process lies in shared memory, which is not to be held for long.
            self.routed_experts = chosen.copy() if known is None else np.concatenate((known, chosen[len(known) :]))

    def append_context(self, token_ids: Sequence[int]) -> None:
        """Add tokens the policy did not write (tool results); they are never trained."""
        self.token_ids.extend(token_ids)
        self.token_mask.extend([0] * len(token_ids))
        self.logprobs.extend([0.0] * len(token_ids))

    def cut(self, limit: int) -> None:
        """Drop what lies past `limit` tokens: nothing after it is trained."""
        if len(self.token_ids) > limit:
            self.truncated = True
        for column in (self.token_ids, self.token_mask, self.logprobs):
            del column[limit:]  # type: ignore[attr-defined]
        if self.routed_experts is not None:
            self.routed_experts = self.routed_experts[:limit]
