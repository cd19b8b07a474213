"""The teachers of on-policy distillation, on the policy's own ranks and in its parallel layout."""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from nemotron_steps.config.schema.policy import PolicyConfig
from nemotron_steps.engine.batching import select_rows
from nemotron_steps.engine.losses.supervised import NegativeLogLikelihood
from nemotron_steps.engine.policy.logprob import linear_states, linear_topk
from nemotron_steps.engine.policy.megatron import MegatronPolicy
from nemotron_steps.engine.types import TrainBatch
from nemotron_steps.errors import ConfigError


class FrozenTeachers:
    """The `Teachers` of this rank. topk: tokens kept of each distribution, 0 for the sampled token's logprob alone;
    None: whole distributions; offload: keep weights in host memory between turns."""

    def __init__(
        self, policy: MegatronPolicy, checkpoints: Mapping[str, Path], topk: int | None, *, offload: bool
    ) -> None:
        vocab_size = policy.architecture.vocab_size
        self._topk = None if topk is None else min(topk, vocab_size)
        self._models = {
            name: frozen_teacher(policy.config, name, checkpoint, vocab_size)
            for name, checkpoint in checkpoints.items()
        }
        if topk is None and policy.groups.is_last_stage:
            # They stay on the device, where every training step needs them.
            policy.teacher_weights = [model.model.output_weight().detach() for model in self._models.values()]
        self._offload = offload and any(model.device.type == "cuda" for model in self._models.values())
        if self._offload:
            for model in self._models.values():
                model.model.to("cpu")

    def score(self, batch: TrainBatch, names: Sequence[str | None]) -> TrainBatch:
        """See Teachers."""
        shape = batch.input_ids.shape
        logprobs, numbers = torch.zeros(shape), torch.zeros(shape[0], dtype=torch.int64)
        states = topk = tokens = None
        if self._topk is None:
            widest = max(model.architecture.hidden_size for model in self._models.values())
            states = torch.zeros(*shape, widest)
        else:
            topk = torch.zeros(*shape, self._topk)
            tokens = torch.zeros(*shape, self._topk, dtype=torch.int32)
        for number, (name, teacher) in enumerate(self._models.items()):
            rows, own = rows_of(name, batch, names)
            if not rows:
                continue
            if self._offload:
                teacher.model.to(teacher.device)
            if states is not None:
                width = teacher.architecture.hidden_size
                logprobs[rows], found = teacher.outputs(own, linear_states, _zeros(own, (), (width,)))
                states[rows, :, :width] = found
                numbers[rows] = number
            elif topk is not None and tokens is not None and self._topk is not None:
                logprobs[rows], topk[rows], tokens[rows] = topk_tokens(teacher, own, self._topk)
            if self._offload:
                teacher.model.to("cpu")
        return dataclasses.replace(
            batch,
            teacher_logprobs=logprobs,
            teacher_topk_logprobs=topk,
            teacher_topk_indices=tokens,
            teacher_states=states,
            teacher_number=None if states is None else numbers,
        )


def frozen_teacher(config: PolicyConfig, name: str, checkpoint: Path, vocab_size: int) -> MegatronPolicy:
    """A teacher on this rank. ConfigError where it has another vocabulary than the policy."""
    plain = config.megatron_cfg.peft.model_copy(update={"enabled": False})
    inference = config.megatron_cfg.model_copy(
        update={"mtp_num_layers": 0, "moe_router_bias_update_rate": 0.0, "peft": plain}
    )
    config = config.model_copy(update={"megatron_cfg": inference})
    model = MegatronPolicy(config, checkpoint, NegativeLogLikelihood(), frozen=True)
    if model.architecture.vocab_size != vocab_size:
        raise ConfigError(
            f"teacher '{name}' has another vocabulary than the policy",
            where=f"on_policy_distillation.teachers.{name}",
            expected=f"{vocab_size} tokens, as the policy",
            found=f"{model.architecture.vocab_size}",
            hints=(f"--input teachers.{name}=PATH   # a model of the policy's family",),
        )
    return model


def rows_of(name: str, batch: TrainBatch, names: Sequence[str | None]) -> tuple[list[int], TrainBatch]:
    """The trained rows that are a teacher's, and their batch, without replayed experts."""
    rows = [row for row, chosen in enumerate(names) if chosen == name and batch.sample_mask[row] > 0]
    return rows, select_rows(dataclasses.replace(batch, routed_experts=None), rows)


def topk_tokens(teacher: MegatronPolicy, batch: TrainBatch, k: int) -> list[Tensor]:
    """[N, T] logprobs of the tokens, [N, T, k] of the teacher's top k, and those."""
    results = [*_zeros(batch, (), (k,)), *_zeros(batch, (k,), dtype=torch.int32)]
    return teacher.outputs(batch, partial(linear_topk, k), results)


def _zeros(batch: TrainBatch, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.zeros(*batch.input_ids.shape, *shape, dtype=dtype) for shape in shapes]
