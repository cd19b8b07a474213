"""What a placed run is made of, wherever its parts live: in_process.py and on_ray.py both give this."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemotron_steps.config.schema.policy import PolicyConfig
from nemotron_steps.engine.generation.sampler import AsyncSampler
from nemotron_steps.engine.losses.loss import Loss
from nemotron_steps.engine.rollouts.judges import StepwiseJudge
from nemotron_steps.engine.types import Generator, Policy, Teachers
from nemotron_steps.environments.environment_set import EnvironmentSet
from nemotron_steps.models.chat import ChatFormat


@dataclass(frozen=True)
class WantedTeachers:
    """Frozen models that grade the policy's rollouts; fields as `FrozenTeachers`'s, and

    Args:
        apart: each teacher's config, where they have devices of their own (cluster.backend=ray).
    """

    checkpoints: dict[str, Path]
    topk: int | None
    offload: bool
    apart: Mapping[str, PolicyConfig] = field(default_factory=dict)


@dataclass(frozen=True)
class Wanted:
    """What a run's parts have to be, beside what its config says.

    Args:
        checkpoint: the policy's checkpoint_megatron folder.
        hf_folder: config.json and tokenizer of the policy.
        chat: of that tokenizer.
        loss_fn: what the policy is trained on.
        reference: keep the policy's first weights, for reference logprobs.
        total_steps: optimizer steps of the run.
        max_total_length: longest sequence of the run, in tokens.
        judges: roles that the rows' environments ask.
        teachers: None without distillation.
    """

    checkpoint: Path
    hf_folder: Path
    chat: ChatFormat
    loss_fn: Loss
    reference: bool
    total_steps: int
    max_total_length: int
    judges: frozenset[str]
    teachers: WantedTeachers | None = None


@dataclass
class Parts:
    """The live parts. `resources` frees them."""

    policy: Policy
    generator: Generator
    """It has the policy's weights."""
    sampler: AsyncSampler
    judges: list[StepwiseJudge]
    environments: EnvironmentSet
    """None is created yet."""
    resources: ExitStack
    where: dict[str, Any]
    """Where everything is, for the journal."""
    teachers: Teachers | None = None
