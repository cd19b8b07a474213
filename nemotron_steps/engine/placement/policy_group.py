"""A `Policy` whose ranks live in actors: every method runs on all of them, rank 0 answers."""

# ruff: noqa: D102  Policy says what each method does

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from nemotron_steps.config.schema.policy import PolicyConfig
from nemotron_steps.engine.losses.loss import Loss
from nemotron_steps.engine.types import Policy, Teachers, TrainBatch
from nemotron_steps.engine.weight_sync.transfer import AdapterTransfer, WeightTransfer
from nemotron_steps.engine.workers.rendezvous import join_store
from nemotron_steps.engine.workers.workers import RankGroup, RankWorker, Worker, settle
from nemotron_steps.errors import StorageError

if TYPE_CHECKING:
    from nemotron_steps.engine.placement.parts import WantedTeachers
    from nemotron_steps.engine.weight_sync.endpoints import SendingEndpoint

Arrays = Mapping[str, npt.NDArray[Any] | None]


SCORES = (
    "teacher_logprobs",
    "teacher_topk_logprobs",
    "teacher_topk_indices",
    "teacher_states",
    "teacher_number",
)
"""Of a batch, what teachers add to it."""
WHOLE = "whole"
FILES = "files"
"""Concurrency group in which snapshots are written while training goes on."""


class PolicyWorker(RankWorker):
    """One rank, inside an actor: the same MegatronPolicy or DTensorPolicy as in one process."""

    THREADS = (*RankWorker.THREADS, FILES)
    _policy: Policy
    _teachers: Teachers

    def __init__(self) -> None:
        self._sending: dict[str, SendingEndpoint] = {}

    def build(self, config: PolicyConfig, checkpoint: Path, loss_fn: Loss, reference: bool, total_steps: int) -> None:
        """Load this rank's part of the model; arguments as setup.policy_backends' build_policy."""
        from nemotron_steps.engine.setup.policy_backends import build_policy

        self._policy = build_policy(config, checkpoint, loss_fn, reference=reference, total_steps=total_steps)

    def build_teachers(self, wanted: WantedTeachers) -> None:
        """Load this rank's part of the teachers."""
        from nemotron_steps.engine.setup.policy_backends import build_teachers

        self._teachers = build_teachers(self._policy, wanted.checkpoints, topk=wanted.topk, offload=wanted.offload)

    def score(self, arrays: Arrays, names: Sequence[str | None]) -> Any:
        """Teachers.score; rank 0 answers with what they add to the batch."""
        scored = arrays_of(self._teachers.score(batch_of(arrays), names))
        return self._answer({name: each for name, each in scored.items() if name in SCORES and each is not None})

    def ask(self, method: str, arrays: Arrays) -> Any:
        """Policy.logprobs, reference_logprobs or train_step; rank 0 answers."""
        found = getattr(self._policy, method)(batch_of(arrays))
        return self._answer(found.numpy() if isinstance(found, torch.Tensor) else found)

    def files(self, method: str, path: str, *more: str) -> None:
        """Policy.save_checkpoint, load_checkpoint, save_model, save_hf or save_adapter."""
        with _storage(path):
            getattr(self._policy, method)(path, *more)

    def snapshot(self) -> None:
        """Policy.snapshot, kept until it is written."""
        self._snapshot = self._policy.snapshot()

    def write_snapshot(self, path: str) -> None:
        """Snapshot.write."""
        with _storage(path):
            self._snapshot.write(path)
        del self._snapshot

    def read_weights(self) -> Any:
        """Policy.weights on the CPU; rank 0 answers, and copies alone what all ranks walk through."""
        weights = self._policy.weights()
        return self._answer([(name, tensor.cpu().clone()) for name, tensor in weights if self._rank == 0])

    def open_sender(
        self, channel: str, transport: str, ipc: Sequence[str] = (), broadcast: Sequence[str] = (), part: str = WHOLE
    ) -> Any:
        """See SendingEndpoint.open. `part`: of weights of which adapters alone change, an AdaptedWeights attribute."""
        from nemotron_steps.engine.weight_sync.endpoints import SendingEndpoint

        # A connection of its own: waiting on a shared one would block torch's own use of it.
        self._sending[channel] = SendingEndpoint(
            channel, lambda: self._weights(part), self._rank, lambda: join_store(*self._address)
        )
        return self._sending[channel].open(transport, ipc, broadcast)

    def adapts_whole_modules(self) -> bool:
        """See AdaptedWeights.whole_modules."""
        from nemotron_steps.engine.policy.lora import AdaptedWeights

        weights = self._policy.weights()
        return isinstance(weights, AdaptedWeights) and weights.whole_modules

    def _weights(self, part: str) -> Any:
        weights = self._policy.weights()
        return iter(weights) if part == WHOLE else getattr(weights, part)()

    def hide_segment(self, channel: str) -> None:
        """See SendingEndpoint.hide_segment."""
        self._sending[channel].hide_segment()

    def send_weights(self, channel: str) -> None:
        """See SendingEndpoint.send."""
        self._sending[channel].send()


@contextmanager
def _storage(path: str) -> Iterator[None]:
    """What the disk refuses is a StorageError in the driver as well."""
    try:
        yield
    except OSError as error:
        raise StorageError("writing failed", where=path, found=str(error)) from error


def arrays_of(batch: TrainBatch) -> dict[str, npt.NDArray[Any] | None]:
    """A batch as arrays, which Ray keeps in shared memory without serialising them."""
    return {name: None if value is None else value.numpy() for name, value in vars(batch).items()}


def batch_of(arrays: Arrays) -> TrainBatch:
    """The inverse of arrays_of; copies, since Ray's arrays are read-only."""
    values: dict[str, Any] = {
        name: None if value is None else torch.from_numpy(np.array(value)) for name, value in arrays.items()
    }
    return TrainBatch(**values)


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

        return self.everywhere("ask", method, ray.put(arrays_of(batch)))
