"""The teachers of on-policy distillation, on the policy's own ranks and in its parallel layout.

One after the other they score the rows that are theirs. On GPUs a teacher's weights are in host memory between its
turns (`on_policy_distillation.offload`), so that however many there are, one lies on the device beside the policy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from nemotron_steps.config.schema.policy import PolicyConfig
from nemotron_steps.engine.batches.batching import select_rows
from nemotron_steps.engine.losses.likelihood import NegativeLogLikelihood
from nemotron_steps.engine.policy.megatron import MegatronPolicy
from nemotron_steps.engine.types import TrainBatch
from nemotron_steps.errors import ConfigError


class FrozenTeachers:
    """The `Teachers` of this rank.

    Args:
        config: of the policy: layout, precision and batch sizes of inference are its.
        checkpoints: name to Megatron or Hugging Face folder.
        topk: tokens kept of each distribution, at most all of them; None: all.
        vocab_size: of the policy.
        offload: keep weights in host memory between turns.

    Raises:
        ConfigError: a teacher has another vocabulary than the policy, or the layout does not fit it.
        ArtifactError: a checkpoint cannot be loaded.
    """

    def __init__(
        self, config: PolicyConfig, checkpoints: Mapping[str, Path], topk: int | None, *, vocab_size: int, offload: bool
    ) -> None:
        inference = config.megatron_cfg.model_copy(update={"mtp_num_layers": 0, "moe_router_bias_update_rate": 0.0})
        config = config.model_copy(update={"megatron_cfg": inference})
        self._topk = vocab_size if topk is None else min(topk, vocab_size)
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
        self._offload = offload and any(model.device.type == "cuda" for model in self._models.values())
        if self._offload:
            for model in self._models.values():
                model.model.to("cpu")

    def score(self, batch: TrainBatch, names: Sequence[str | None]) -> TrainBatch:
        """See Teachers."""
        shape = batch.input_ids.shape
        logprobs, heaviest = torch.zeros(shape), torch.zeros(*shape, self._topk)
        tokens = torch.zeros(*shape, self._topk, dtype=torch.int32)
        plain = dataclasses.replace(batch, routed_experts=None)  # the policy's choices, not a teacher's
        for name, teacher in self._models.items():
            rows = [row for row, chosen in enumerate(names) if chosen == name and batch.sample_mask[row] > 0]
            if not rows:
                continue
            if self._offload:
                teacher.model.to(teacher.device)
            logprobs[rows], heaviest[rows], tokens[rows] = teacher.topk_logprobs(select_rows(plain, rows), self._topk)
            if self._offload:
                teacher.model.to("cpu")
        return dataclasses.replace(
            batch, teacher_logprobs=logprobs, teacher_topk_logprobs=heaviest, teacher_topk_indices=tokens
        )
