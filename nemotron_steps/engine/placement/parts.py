"""What a placed run is made of, wherever its parts live: here in this process; on_ray.py gives the same."""

from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemotron_steps.config.schema.policy import PolicyConfig
from nemotron_steps.config.schema.rl import NemoGymConfig, RlConfig
from nemotron_steps.engine.generation.sampler import AsyncSampler
from nemotron_steps.engine.losses.loss import Loss
from nemotron_steps.engine.memory_tuning import share_gpu_memory
from nemotron_steps.engine.rollouts.judges import GeneratorJudge, StepwiseJudge
from nemotron_steps.engine.setup.backends import build_generator, build_judges
from nemotron_steps.engine.setup.policy_backends import build_policy, build_teachers
from nemotron_steps.engine.types import Generator, Policy, Teachers
from nemotron_steps.environments.environment_set import EnvironmentSet
from nemotron_steps.environments.judged.judges import HttpJudge, Judge
from nemotron_steps.models.chat import ChatFormat


@dataclass(frozen=True)
class WantedTeachers:
    """Frozen models that grade the policy's rollouts; `apart` has the configs of those with devices of their own."""

    checkpoints: dict[str, Path]
    topk: int | None
    offload: bool
    apart: Mapping[str, PolicyConfig] = field(default_factory=dict)


@dataclass(frozen=True)
class Wanted:
    """What a run's parts have to be, beside what its config says."""

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


def judges_here(
    gym: NemoGymConfig, roles: Collection[str], resources: ExitStack, *, defer_to: AsyncSampler | None, seed: int
) -> dict[str, Judge]:
    """`build_judges`, whose connections are closed with `resources`."""
    judges = build_judges(gym, roles, defer_to=defer_to, seed=seed)
    for judge in judges.values():
        if isinstance(judge, HttpJudge):
            resources.callback(judge.close)
    return judges


def place_in_process(config: RlConfig, wanted: Wanted) -> Parts:
    """Load everything."""
    if config.policy.generation.backend == "embedded":
        share_gpu_memory()
    policy = build_policy(
        config.policy,
        wanted.checkpoint,
        wanted.loss_fn,
        reference=wanted.reference,
        total_steps=wanted.total_steps,
    )
    asked = wanted.teachers
    teachers = None
    if asked is not None:
        teachers = build_teachers(policy, asked.checkpoints, topk=asked.topk, offload=asked.offload)
    generator = build_generator(
        wanted.hf_folder,
        config.policy.generation,
        wanted.chat,
        max_total_length=wanted.max_total_length,
        precision=config.policy.precision,
        weights=policy.weights(),
        asynchronous=config.grpo.async_grpo,
        record_routed_experts=config.policy.router_replay.enabled,
    )
    with ExitStack() as resources:
        resources.callback(generator.close)
        sampler = AsyncSampler(generator, name="policy")
        # In the asynchronous loop the policy's generator is never idle, so a judge must not wait for that.
        defer_to = None if config.grpo.async_grpo.enabled else sampler
        judges = judges_here(config.env.nemo_gym, wanted.judges, resources, defer_to=defer_to, seed=config.grpo.seed)
        environments = EnvironmentSet(config.env.nemo_gym.environments, judges, only=config.env.only_environment)
        stepwise: list[StepwiseJudge] = [j for j in judges.values() if isinstance(j, GeneratorJudge | HttpJudge)]
        where = {"backend": "process"}
        return Parts(policy, generator, sampler, stepwise, environments, resources.pop_all(), where, teachers)
