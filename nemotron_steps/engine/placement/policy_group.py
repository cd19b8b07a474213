"""A `Policy` whose ranks live in actors: every method runs on all of them, rank 0 answers; and teachers with ranks of
their own, each a world with its own layout, all scoring at the same time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from nemotron_steps.config.schema.policy import PolicyConfig
from nemotron_steps.engine.losses.loss import Loss
from nemotron_steps.engine.types import Policy, Teachers, TrainBatch
from nemotron_steps.engine.weight_sync.transfer import WeightTransfer
from nemotron_steps.engine.workers.workers import RankGroup, RankWorker, Worker, join_store, settle
from nemotron_steps.errors import StorageError

if TYPE_CHECKING:
    from nemotron_steps.config.schema.opd import TeacherResourceConfig
    from nemotron_steps.engine.placement.run import WantedTeachers
    from nemotron_steps.engine.policy.megatron import MegatronPolicy
    from nemotron_steps.engine.weight_sync.transfer import StreamSender

# ruff: noqa: D102  Policy says what each method does

Arrays = Mapping[str, npt.NDArray[Any] | None]
_TOPK = ("teacher_topk_logprobs", "teacher_topk_indices")
SCORES = ("teacher_logprobs", *_TOPK, "teacher_states", "teacher_number")
"""Of a batch, what teachers add to it."""
FILES = "files"
"""Concurrency group in which snapshots are written while training goes on."""


class PolicyWorker(RankWorker):
    """One rank, inside an actor: the same MegatronPolicy or DTensorPolicy as in one process."""

    THREADS = (*RankWorker.THREADS, FILES)
    _policy: Policy
    _teachers: Teachers

    _sender: StreamSender | None = None

    def build(self, config: PolicyConfig, checkpoint: Path, loss_fn: Loss, reference: bool, total_steps: int) -> None:
        """Load this rank's part of the model; arguments as setup.backends' build_policy."""
        from nemotron_steps.engine.setup.backends import build_policy

        self._policy = build_policy(config, checkpoint, loss_fn, reference=reference, total_steps=total_steps)

    def build_teachers(self, wanted: WantedTeachers) -> None:
        """Load this rank's part of the teachers."""
        from nemotron_steps.engine.setup.backends import build_teachers

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

    def open_sender(self, channel: str, ipc: Sequence[str], broadcast: Sequence[str]) -> Any:
        """Get ready to send; returns what the receivers need, None from a rank that only takes part."""
        from nemotron_steps.engine.policy.distributed import parallel_dims
        from nemotron_steps.engine.weight_sync.transfer import StreamSender, WeightPlan

        plan = WeightPlan.of(self._policy.weights())
        self._sender = None
        if not ipc and not broadcast:
            return None
        # A connection of its own: waiting on a shared one would block torch's own use of it.
        store, name = join_store(*self._address), f"{channel}/rank {self._rank}"
        self._sender = StreamSender(plan, store, name, ipc=ipc, broadcast=broadcast, device=parallel_dims.device())
        return self._sender.offer()

    def send_weights(self) -> None:
        """One transfer; reading weights is collective, so every rank does to the end, whether it sends or not."""
        if self._sender is not None:
            self._sender.send(iter(self._policy.weights()))
            return
        for _ in self._policy.weights():
            pass


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

    def build(
        self, config: PolicyConfig, checkpoint: Path, loss_fn: Loss, *, reference: bool, total_steps: int
    ) -> None:
        """Load the model on every rank; arguments as setup.backends' build_policy."""
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

    def transfer_to(self, receivers: Sequence[Worker], processes: int = 1) -> WeightTransfer:
        """Open the transports from the ranks to generation workers, or to the processes that each of them runs."""
        return WeightTransfer(self.workers, receivers, self.address, processes=processes)

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


class TeacherWorker(RankWorker):
    """One rank of a teacher. Methods are called on all ranks in the same order."""

    _teacher: MegatronPolicy

    def build(self, config: PolicyConfig, name: str, checkpoint: Path, vocab_size: int) -> None:
        """Load this rank's part; arguments as `frozen_teacher`'s."""
        from nemotron_steps.engine.policy.teachers import frozen_teacher

        self._teacher = frozen_teacher(config, name, checkpoint, vocab_size)

    def heaviest_tokens(self, arrays: Arrays, k: int) -> Any:
        """See engine.policy.teachers; rank 0 answers."""
        from nemotron_steps.engine.policy.teachers import topk_tokens

        return self._answer([found.numpy() for found in topk_tokens(self._teacher, batch_of(arrays), k)])


class PlacedTeachers:
    """The `Teachers` of a run, each with ranks of its own."""

    def __init__(
        self, options: Mapping[str, Sequence[Mapping[str, Any]]], topk: int, vocab_size: int, *, local: bool
    ) -> None:
        self._topk, self._vocab_size = min(topk, vocab_size), vocab_size
        self._groups: dict[str, RankGroup] = {}
        with ExitStack() as started:
            for name, own in options.items():
                self._groups[name] = RankGroup(f"teacher {name}", TeacherWorker, own, local=local)
                started.callback(self._groups[name].close)
            self._started = started.pop_all()
        self.workers = [worker for group in self._groups.values() for worker in group.workers]

    def build(self, configs: Mapping[str, PolicyConfig], checkpoints: Mapping[str, Path]) -> None:
        """Load all of them at once; arguments by teacher, as `frozen_teacher`'s."""
        calls: dict[Any, Worker] = {}
        for name, group in self._groups.items():
            calls |= group.calls("build", configs[name], name, checkpoints[name], self._vocab_size)
        settle(calls)

    def score(self, batch: TrainBatch, names: Sequence[str | None]) -> TrainBatch:
        """See Teachers."""
        import ray
        import torch

        from nemotron_steps.engine.policy.teachers import rows_of

        shape = batch.input_ids.shape
        logprobs, heaviest = torch.zeros(shape), torch.zeros(*shape, self._topk)
        tokens = torch.zeros(*shape, self._topk, dtype=torch.int32)
        asked: list[list[int]] = []
        calls: dict[Any, Worker] = {}
        for name, group in self._groups.items():
            rows, own = rows_of(name, batch, names)
            if rows:
                asked.append(rows)
                calls |= group.calls("heaviest_tokens", ray.put(arrays_of(own)), self._topk)
        answers = [answer for answer in settle(calls) if answer is not None]  # rank 0's, of each that was asked
        for rows, found in zip(asked, answers, strict=True):
            own_results = (torch.from_numpy(np.array(each)) for each in found)
            logprobs[rows], heaviest[rows], tokens[rows] = own_results
        return replace(batch, teacher_logprobs=logprobs, teacher_topk_logprobs=heaviest, teacher_topk_indices=tokens)

    def close(self) -> None:
        """End the ranks."""
        self._started.close()


def teacher_config(config: PolicyConfig, own: TeacherResourceConfig) -> PolicyConfig:
    """A policy's config with the layout, precision and micro-batches of a teacher."""
    sizes = (f"{axis}_parallel_size" for axis in ("tensor_model", "pipeline_model", "context", "expert_model"))
    layout = {name: getattr(own, name) for name in (*sizes, "sequence_parallel")}
    changes: dict[str, Any] = {"megatron_cfg": config.megatron_cfg.model_copy(update=layout)}
    if own.precision is not None:
        changes["precision"] = own.precision
    if own.micro_batch_size is not None:
        changes["logprob_batch_size"] = own.micro_batch_size
        for name in ("sequence_packing", "dynamic_batching"):  # whose budgets then follow from the rows
            changes[name] = getattr(config, name).model_copy(update={"logprob_mb_tokens": None})
    return config.model_copy(update=changes)
