"""A `Policy` whose ranks live in actors: every method runs on all of them, rank 0 answers."""

# ruff: noqa: D102  Policy says what each method does

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from nemotron_steps.config.schema.policy import PolicyConfig
from nemotron_steps.engine.losses.loss import Loss
from nemotron_steps.engine.placement.policy_worker import FILES, PolicyWorker, arrays_of
from nemotron_steps.engine.types import Teachers, TrainBatch
from nemotron_steps.engine.weight_sync.transfer import AdapterTransfer, WeightTransfer
from nemotron_steps.engine.workers.ranks import RankGroup
from nemotron_steps.engine.workers.workers import Worker, settle

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nemotron_steps.engine.placement.parts import WantedTeachers


class PlacedWeights:
    """The weights of a placed policy. A placed generator fetches them from the ranks; others may iterate."""

    def __init__(self, policy: RayPolicy) -> None:
        self.policy = policy

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors, all of them in this process: to look at, not to train with."""
        yield from self.policy.everywhere("read_weights")


class PlacedSnapshot:
    """The `Snapshot` of a placed policy: every rank keeps its part and writes it beside the training."""

    def __init__(self, ranks: Sequence[Worker]) -> None:
        self._ranks = ranks

    def write(self, path: str) -> None:
        settle({rank.beside("write_snapshot", path, thread=FILES): rank for rank in self._ranks})


class RayPolicy(RankGroup):
    """See the module docstring; arguments as RankGroup's."""

    def __init__(self, options: Sequence[Mapping[str, Any]], *, local: bool) -> None:
        super().__init__("policy", PolicyWorker, options, local=local)
        self._adapted = False

    def build(
        self, config: PolicyConfig, checkpoint: Path, loss_fn: Loss, *, reference: bool, total_steps: int
    ) -> None:
        """Load the model on every rank; arguments as setup.policy_backends' build_policy."""
        self._adapted = config.adapters.enabled
        self.everywhere("build", config, checkpoint, loss_fn, reference, total_steps)

    def build_teachers(self, wanted: WantedTeachers) -> Teachers:
        """Load the teachers on every rank, where `score` asks them."""
        self.everywhere("build_teachers", wanted)
        return self

    def score(self, batch: TrainBatch, names: Sequence[str | None]) -> TrainBatch:
        """See Teachers; the ranks have them."""
        import ray

        scores = self.everywhere("score", ray.put(arrays_of(batch)), list(names))
        return replace(batch, **{name: torch.from_numpy(np.array(each)) for name, each in scores.items()})

    def logprobs(self, batch: TrainBatch) -> torch.Tensor:
        return torch.from_numpy(self._with_batch("logprobs", batch).copy())

    def reference_logprobs(self, batch: TrainBatch) -> torch.Tensor:
        return torch.from_numpy(self._with_batch("reference_logprobs", batch).copy())

    def train_step(self, batch: TrainBatch) -> dict[str, float]:
        metrics: dict[str, float] = self._with_batch("train_step", batch)
        return metrics

    def weights(self) -> PlacedWeights:
        """See Policy. Nothing moves until a generator or an iteration asks for it."""
        return PlacedWeights(self)

    def transfer_to(
        self, receivers: Sequence[Worker], processes: int = 1, *, forgets: bool = False, loads_modules: bool = False
    ) -> WeightTransfer | AdapterTransfer:
        """Open the transports from the ranks to generation workers, or to the processes that each of them runs."""
        alone = self._adapted and not forgets
        if alone and loads_modules:
            alone = self.everywhere("adapts_whole_modules")
        return (AdapterTransfer if alone else WeightTransfer)(
            self.workers, receivers, self.address, processes=processes
        )

    def save_checkpoint(self, path: str) -> None:
        self.everywhere("files", "save_checkpoint", path)

    def snapshot(self) -> PlacedSnapshot:
        """See Policy. The copies stay with the ranks."""
        self.everywhere("snapshot")
        return PlacedSnapshot(self.workers)

    def load_checkpoint(self, path: str) -> None:
        self.everywhere("files", "load_checkpoint", path)

    def save_model(self, path: str | Path) -> None:
        self.everywhere("files", "save_model", str(path))

    def save_hf(self, path: str | Path) -> None:
        self.everywhere("files", "save_hf", str(path))

    def save_adapter(self, path: str | Path, base: str, digest: str) -> None:
        self.everywhere("files", "save_adapter", str(path), base, digest)

    def _with_batch(self, method: str, batch: TrainBatch) -> Any:
        import ray

        return self.everywhere(method, ray.put(arrays_of(batch)))
