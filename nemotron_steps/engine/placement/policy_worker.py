"""One rank of a policy, inside an actor: the same MegatronPolicy or DTensorPolicy as in one process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from nemotron_steps.engine.workers.ranks import RankWorker
from nemotron_steps.engine.workers.rendezvous import join_store
from nemotron_steps.errors import StorageError

if TYPE_CHECKING:
    from nemotron_steps.config.schema.policy import PolicyConfig
    from nemotron_steps.engine.losses.loss import Loss
    from nemotron_steps.engine.placement.parts import WantedTeachers
    from nemotron_steps.engine.types import Policy, Teachers, TrainBatch
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
    """See the module docstring. Methods are called on all ranks in the same order."""

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

    def logprobs(self, arrays: Arrays) -> Any:
        """Policy.logprobs; rank 0 answers."""
        return self._answer(self._policy.logprobs(batch_of(arrays)).numpy())

    def reference_logprobs(self, arrays: Arrays) -> Any:
        """Policy.reference_logprobs; rank 0 answers."""
        return self._answer(self._policy.reference_logprobs(batch_of(arrays)).numpy())

    def train_step(self, arrays: Arrays) -> Any:
        """Policy.train_step; rank 0 answers."""
        return self._answer(self._policy.train_step(batch_of(arrays)))

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
        """Policy.weights on the CPU; rank 0 answers."""
        return self._answer([(name, tensor.cpu().clone()) for name, tensor in self._policy.weights()])

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
    import torch

    from nemotron_steps.engine.types import TrainBatch

    values: dict[str, Any] = {
        name: None if value is None else torch.from_numpy(np.array(value)) for name, value in arrays.items()
    }
    return TrainBatch(**values)
