"""The teachers of on-policy distillation, on the policy's own ranks and in its parallel layout.

One after the other they score the rows that are theirs. On GPUs a teacher's weights are in host memory between its
turns (`on_policy_distillation.offload`), so that however many there are, one lies on the device beside the policy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

from nemotron_steps.engine.batches.batching import select_rows
from nemotron_steps.engine.losses.likelihood import NegativeLogLikelihood
from nemotron_steps.engine.policy.megatron import MegatronPolicy
from nemotron_steps.engine.policy.teacher_logprob import linear_states, linear_topk
from nemotron_steps.engine.types import TrainBatch
from nemotron_steps.errors import ConfigError


class FrozenTeachers:
    """The `Teachers` of this rank.

    Args:
        policy: on this rank: layout, precision and batch sizes of inference are its. Where whole distributions are
            compared, it is given the teachers' output layers.
        checkpoints: name to Megatron or Hugging Face folder.
        topk: tokens kept of each distribution, at most all of them; None: whole distributions, as hidden
            states.
        offload: keep weights in host memory between turns.

    Raises:
        ConfigError: a teacher has another vocabulary than the policy, or the layout does not fit it.
        ArtifactError: a checkpoint cannot be loaded.
    """

    def __init__(
        self, policy: MegatronPolicy, checkpoints: Mapping[str, Path], topk: int | None, *, offload: bool
    ) -> None:
        config, vocab_size = policy.config, policy.architecture.vocab_size
        plain = config.megatron_cfg.peft.model_copy(update={"enabled": False})
        inference = config.megatron_cfg.model_copy(
            update={"mtp_num_layers": 0, "moe_router_bias_update_rate": 0.0, "peft": plain}
        )
        config = config.model_copy(update={"megatron_cfg": inference})
        self._topk = None if topk is None else min(topk, policy.architecture.vocab_size)
        self._models: dict[str, MegatronPolicy] = {}
        for name, checkpoint in checkpoints.items():
            model = MegatronPolicy(config, checkpoint, NegativeLogLikelihood(), frozen=True)
            if model.architecture.vocab_size != vocab_size:
                raise ConfigError(
                    f"teacher '{name}' has another vocabulary than the policy",
                    where=f"on_policy_distillation.teachers.{name}",
                    expected=f"{vocab_size} tokens, as the policy",
                    found=f"{model.architecture.vocab_size}",
                    hints=(f"--input teachers.{name}=PATH   # a model of the policy's family",),
                )
            self._models[name] = model
        if topk is None and policy.groups.is_last_stage:
            # They stay on the device, where every training step needs them.
            policy.teacher_weights = [model.model.output_weight().detach() for model in self._models.values()]
        self._offload = offload and any(model.device.type == "cuda" for model in self._models.values())
        if self._offload:
            for model in self._models.values():
                model.model.to("cpu")

    def score(self, batch: TrainBatch, names: Sequence[str | None]) -> TrainBatch:
        """See Teachers."""
        plain = dataclasses.replace(batch, routed_experts=None)  # the policy's choices, not a teacher's
        shape = batch.input_ids.shape
        logprobs, numbers = torch.zeros(shape), torch.zeros(shape[0], dtype=torch.int64)
        states = heaviest = tokens = None
        if self._topk is None:
            widest = max(model.architecture.hidden_size for model in self._models.values())
            states = torch.zeros(*shape, widest)
        else:
            heaviest = torch.zeros(*shape, self._topk)
            tokens = torch.zeros(*shape, self._topk, dtype=torch.int32)
        for number, (name, teacher) in enumerate(self._models.items()):
            rows = [row for row, chosen in enumerate(names) if chosen == name and batch.sample_mask[row] > 0]
            if not rows:
                continue
            own = select_rows(plain, rows)
            if self._offload:
                teacher.model.to(teacher.device)
            if states is not None:
                width = teacher.architecture.hidden_size
                logprobs[rows], found = teacher.outputs(own, linear_states, _zeros(own, (), (width,)))
                states[rows, :, :width] = found
                numbers[rows] = number
            elif heaviest is not None and tokens is not None and self._topk is not None:
                results = [*_zeros(own, (), (self._topk,)), *_zeros(own, (self._topk,), dtype=torch.int32)]
                found_topk = teacher.outputs(own, partial(linear_topk, self._topk), results)
                logprobs[rows], heaviest[rows], tokens[rows] = found_topk
            if self._offload:
                teacher.model.to("cpu")
        return dataclasses.replace(
            batch,
            teacher_logprobs=logprobs,
            teacher_topk_logprobs=heaviest,
            teacher_topk_indices=tokens,
            teacher_states=states,
            teacher_number=None if states is None else numbers,
        )


def _zeros(batch: TrainBatch, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """[N, T, *shape] each."""
    return [torch.zeros(*batch.input_ids.shape, *shape, dtype=dtype) for shape in shapes]
