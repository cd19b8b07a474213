"""Teachers on devices of their own: each a world of ranks with its own layout, all scoring at the same time.

They hold their weights for the whole run. What is scored is what teachers on the policy's ranks score
(engine/policy/teachers.py); only each position's top-k tokens travel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nemotron_steps.engine.placement.policy_group import Arrays, arrays_of, batch_of
from nemotron_steps.engine.workers.workers import RankGroup, RankWorker, Worker, settle

if TYPE_CHECKING:
    from nemotron_steps.config.schema.opd import TeacherResourceConfig
    from nemotron_steps.config.schema.policy import PolicyConfig
    from nemotron_steps.engine.policy.megatron import MegatronPolicy
    from nemotron_steps.engine.types import TrainBatch


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
