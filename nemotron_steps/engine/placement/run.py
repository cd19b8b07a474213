"""A run from its validated config: every live part, in this process or, by on_ray.py, in Ray actors; of a GRPO run what
the loop needs around them; and half a run, a policy without a generator (SFT, DPO) or a generator without a policy.
"""

import gc
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from nemotron_steps.config.layout.constraints import (
    device_violations,
    raise_if_ray_needed,
    raise_if_violated,
    violations,
)
from nemotron_steps.config.layout.model_limits import teacher_violations
from nemotron_steps.config.layout.parallel_config import parallel_config_of
from nemotron_steps.config.schema.opd import OpdConfig
from nemotron_steps.config.schema.policy import GenerationConfig, PolicyConfig
from nemotron_steps.config.schema.rl import ClusterConfig, EnvConfig, RlConfig
from nemotron_steps.engine.checkpoints import CheckpointManager
from nemotron_steps.engine.generation.sampler import AsyncSampler
from nemotron_steps.engine.grpo.loop import GrpoRun, StepwiseJudge
from nemotron_steps.engine.grpo.rewards import RewardPenalties
from nemotron_steps.engine.grpo.step import Distillation, needs_reference_logprobs
from nemotron_steps.engine.losses.distillation import DistillationLoss, TeacherKl
from nemotron_steps.engine.losses.loss import Loss, SampledFrom
from nemotron_steps.engine.losses.policy_gradient import PolicyGradientLoss
from nemotron_steps.engine.memory_tuning import share_gpu_memory
from nemotron_steps.engine.placement.policy_group import teacher_config
from nemotron_steps.engine.reporting import Reporter
from nemotron_steps.engine.setup.backends import (
    GeneratorJudge,
    build_collector,
    build_generator,
    build_judges,
    build_policy,
    build_teachers,
)
from nemotron_steps.engine.setup.rows import RunRows, check_run_rows, prompt_stream, teacher_choice
from nemotron_steps.engine.signals import SignalMonitor
from nemotron_steps.engine.types import Generator, Policy, Teachers
from nemotron_steps.engine.workers.workers import places
from nemotron_steps.environments.environment_set import EnvironmentSet
from nemotron_steps.environments.judged.judges import HttpJudge, Judge
from nemotron_steps.errors import ConfigError
from nemotron_steps.models.architecture import facts_of, hf_folder
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


def graders_here(
    env: EnvConfig,
    roles: Collection[str],
    sampler: AsyncSampler,
    resources: ExitStack,
    *,
    seed: int,
    wait: bool = True,
) -> tuple[dict[str, Judge], EnvironmentSet]:
    """Judges of this process, which may `wait` until the sampler is idle, and the environments that ask them."""
    judges = build_judges(env.nemo_gym, roles, defer_to=sampler if wait else None, seed=seed)
    for judge in judges.values():
        if isinstance(judge, HttpJudge):
            resources.callback(judge.close)
    return judges, EnvironmentSet(env.nemo_gym.environments, judges, only=env.only_environment)


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
        wait = not config.grpo.async_grpo.enabled
        judges, environments = graders_here(
            config.env, wanted.judges, sampler, resources, seed=config.grpo.seed, wait=wait
        )
        stepwise: list[StepwiseJudge] = [j for j in judges.values() if isinstance(j, GeneratorJudge | HttpJudge)]
        where = {"backend": "process"}
        return Parts(policy, generator, sampler, stepwise, environments, resources.pop_all(), where, teachers)


def build_run(
    config: RlConfig, rows: RunRows, *, work: Path, reporter: Reporter, started: float
) -> tuple[GrpoRun, EnvironmentSet]:
    """Every part of a training run; rows are checked against their environments before anything is loaded."""
    raise_if_ray_needed(config)
    grpo = config.grpo
    needs = check_run_rows(config, rows)
    if config.policy.checkpoint is None:
        raise ConfigError("no policy to train", where="policy.checkpoint", hints=["--input policy=PATH"])
    folder = hf_folder(config.policy.checkpoint)
    chat = ChatFormat.from_folder(folder, config.policy.tokenizer.chat_template_kwargs)
    penalties = None
    if config.reward_penalties.any_enabled:
        asked = chat.render_text([{"role": "user", "content": "x"}])
        penalties = RewardPenalties.of(config.reward_penalties, config.env.nemo_gym.thinking_tags, asked, chat.encode)
    prompts = prompt_stream(config, rows.train)
    updates = grpo.num_prompts_per_step * grpo.num_generations_per_prompt // config.policy.train_global_batch_size
    wanted = Wanted(
        checkpoint=Path(config.policy.checkpoint),
        hf_folder=folder,
        chat=chat,
        loss_fn=_loss(config),
        reference=needs_reference_logprobs(config.loss_fn),
        total_steps=prompts.num_steps(grpo.max_num_steps) * updates,
        max_total_length=max(config.policy.max_total_sequence_length, config.policy.max_total_sequence_length_end or 0),
        judges=needs.judges,
        teachers=_teachers(config),
    )
    gc.collect()  # frees what an earlier run of this process left on its GPU in cycles
    parts = place(config, wanted)
    with parts.resources:
        reporter.event("placement", **parts.where)
        collector = build_collector(
            config.policy.generation,
            chat,
            parts.sampler,
            parts.environments,
            needs,
            seed=grpo.seed,
            max_total_length=config.policy.max_total_sequence_length,
            longest=wanted.max_total_length,
            max_turns=grpo.max_rollout_turns,
            reporter=reporter,
            resources=parts.resources,
        )
        distillation, choice = None, teacher_choice(config)
        if choice is not None and parts.teachers is not None:
            distillation = Distillation(choice.of, parts.teachers, gives_advantages=grpo.adv_estimator.name == "opd")
        trained_on = [name for name in needs.environments if parts.environments.get(name).name in needs.trained_on]
        grade = [parts.environments.get(name) for name in trained_on]
        alone = len(needs.trained_on) == 1 and not grpo.low_effort.enabled  # which adds to the reward
        run = GrpoRun(
            config=config,
            policy=parts.policy,
            generator=parts.generator,
            sampler=parts.sampler,
            collector=collector,
            judges=parts.judges,
            prompts=prompts,
            validation=rows.validation,
            checkpoints=CheckpointManager(work / "checkpoints", config.checkpointing, started=started),
            reporter=reporter,
            signals=SignalMonitor(
                reward_range=(grade[0].usual_range or grade[0].reward_range) if alone else None,
                max_policy_lag=grpo.async_grpo.max_trajectory_age_steps if grpo.async_grpo.enabled else None,
                stop_on=config.signals.stop_on,
            ),
            reward_penalties=penalties,
            distillation=distillation,
        )
        run.resources = parts.resources.pop_all()
    return run, parts.environments


def place(config: RlConfig, wanted: Wanted) -> Parts:
    """Load every part where `cluster` puts it."""
    sizes = parallel_config_of(config)
    raise_if_violated(violations(sizes, facts_of(wanted.hf_folder)))
    if wanted.teachers is not None:
        known = {name: facts_of(path) for name, path in wanted.teachers.checkpoints.items()}
        for each in teacher_violations(sizes, {name: facts for name, facts in known.items() if facts is not None}):
            raise_if_violated(each.violations, f"{each.teachers}: ")
    if config.cluster.backend == "ray":
        from nemotron_steps.engine.placement import on_ray

        return on_ray.place(config, wanted)
    return place_in_process(config, wanted)


def _loss(config: RlConfig) -> Loss:
    if not isinstance(config, OpdConfig) or config.grpo.adv_estimator.name == "opd":
        return PolicyGradientLoss(config.loss_fn, SampledFrom.of(config.policy.generation))
    loss = config.loss_fn
    return DistillationLoss(TeacherKl(loss.kl_type, loss.mixed_kl_weight, loss.zero_outside_topk))


def _teachers(config: RlConfig) -> WantedTeachers | None:
    if not isinstance(config, OpdConfig):
        return None
    settings = config.on_policy_distillation
    apart = settings.non_colocated_teachers
    return WantedTeachers(
        checkpoints={name: Path(folder) for name, folder in settings.teachers.items()},
        topk=0 if config.grpo.adv_estimator.name == "opd" else settings.topk_logits_k,
        offload=settings.offload,
        apart={name: teacher_config(config.policy, apart.of(name)) for name in settings.teachers if apart.enabled},
    )


@contextmanager
def open_policy(
    cluster: ClusterConfig,
    config: PolicyConfig,
    checkpoint: Path,
    loss_fn: Loss,
    *,
    reference: bool,
    total_steps: int,
) -> Iterator[tuple[Policy, dict[str, Any]]]:
    """A policy that trains without a generator, until the block ends; and where it is, for the journal."""
    if cluster.backend != "ray":
        here = build_policy(config, checkpoint, loss_fn, reference=reference, total_steps=total_steps)
        yield here, {"backend": "process"}
        return
    sizes = parallel_config_of(SimpleNamespace(cluster=cluster, policy=config))
    raise_if_violated([*device_violations(sizes)])
    gpu = 1.0 if cluster.gpus_per_node else 0.0
    from nemotron_steps.engine.placement.cluster import RayCluster
    from nemotron_steps.engine.placement.policy_group import RayPolicy

    with ExitStack() as resources:
        ray = RayCluster(cluster, workers=sizes.ranks)
        resources.callback(ray.close)
        ray.reserve([{"GPU": gpu} if gpu else {}] * sizes.ranks)
        policy = RayPolicy([ray.options(rank, gpu) for rank in range(sizes.ranks)], local=ray.is_local)
        resources.callback(policy.close)
        policy.build(config, checkpoint, loss_fn, reference=reference, total_steps=total_steps)
        yield policy, {"backend": "ray", "workers": places(policy.workers)}


@dataclass(frozen=True)
class SamplingWanted:
    """What is to sample, and who grades it; `hf_folder` has weights, config.json and tokenizer."""

    hf_folder: Path
    chat: ChatFormat
    generation: GenerationConfig
    env: EnvConfig
    judges: frozenset[str]
    """Roles that the rows' environments ask."""
    max_total_length: int
    precision: str
    seed: int
    """Of the judges."""


@dataclass
class SamplingParts:
    """The live parts, with environments of which none is created yet. `resources` frees them."""

    sampler: AsyncSampler
    environments: EnvironmentSet
    resources: ExitStack
    where: dict[str, Any]


def place_sampling(cluster: ClusterConfig, wanted: SamplingWanted) -> SamplingParts:
    """Load everything where `cluster` puts it."""
    if cluster.backend == "ray":
        from nemotron_steps.engine.placement import on_ray

        return on_ray.place_sampling(cluster, wanted)
    with ExitStack() as resources:
        generator = build_generator(
            wanted.hf_folder,
            wanted.generation,
            wanted.chat,
            max_total_length=wanted.max_total_length,
            precision=wanted.precision,
        )
        resources.callback(generator.close)
        sampler = AsyncSampler(generator, name="policy")
        _, environments = graders_here(wanted.env, wanted.judges, sampler, resources, seed=wanted.seed)
        return SamplingParts(sampler, environments, resources.pop_all(), {"backend": "process"})
