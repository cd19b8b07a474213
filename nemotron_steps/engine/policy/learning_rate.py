"""The dtensor policy's learning rate: torch's own schedulers, at any step of a run."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch.optim import lr_scheduler

from nemotron_steps.config.schema.policy import TorchSchedulerConfig

_WHOLE = ("total_iters", "T_max")
"""Arguments that count steps."""


class TorchLearningRate:
    """The rate of each optimizer step.

    Args:
        lr: what the schedulers start from.
        entries: `policy.scheduler`; none: a constant rate.
    """

    def __init__(self, lr: float, entries: Sequence[TorchSchedulerConfig]) -> None:
        self._lr, self._entries = lr, entries
        self._begin()

    def at(self, step: int) -> float:
        """The rate of optimizer step `step` (0-based)."""
        if step < self._step:
            self._begin()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # SequentialLR calls its parts in a way that torch deprecates
            while self._step < step:
                self._optimizer.step()
                for scheduler in self._schedulers:
                    scheduler.step()
                self._step += 1
        return float(self._optimizer.param_groups[0]["lr"])

    def _begin(self) -> None:
        self._step = 0
        self._optimizer = torch.optim.SGD([torch.zeros(1)], lr=self._lr)
        parts = [_scheduler(entry, self._optimizer) for entry in self._entries if entry.name is not None]
        milestones = [step for entry in self._entries for step in entry.milestones or ()]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            several = len(parts) > 1
            self._schedulers = [lr_scheduler.SequentialLR(self._optimizer, parts, milestones)] if several else parts


def _scheduler(entry: TorchSchedulerConfig, optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    assert entry.name is not None
    kwargs = {name: int(value) if name in _WHOLE else value for name, value in entry.kwargs.items()}
    made: lr_scheduler.LRScheduler = getattr(lr_scheduler, entry.name.rpartition(".")[2])(optimizer, **kwargs)
    return made
