"""A run's parts in this process (`cluster.backend=process`)."""

from __future__ import annotations

from contextlib import ExitStack

from nemotron_steps.config.schema.rl import RlConfig
from nemotron_steps.engine.backends.generator import build_generator
from nemotron_steps.engine.backends.judges import build_judges
from nemotron_steps.engine.backends.policy import build_policy, build_teachers
from nemotron_steps.engine.generation.sampler import AsyncSampler
from nemotron_steps.engine.memory_tuning import share_gpu_memory
from nemotron_steps.engine.placement.parts import Parts, Wanted
from nemotron_steps.engine.rollouts.judges import GeneratorJudge, StepwiseJudge
from nemotron_steps.environments.environment_set import EnvironmentSet
from nemotron_steps.environments.judged.judges import HttpJudge


def place(config: RlConfig, wanted: Wanted) -> Parts:
    """Load everything.

    Raises:
        UnsupportedError: a part cannot do what the config asks of it.
    """
    asynchronous = config.grpo.async_grpo
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
        asynchronous=asynchronous,
        record_routed_experts=config.policy.router_replay.enabled,
    )
    with ExitStack() as resources:
        resources.callback(generator.close)
        sampler = AsyncSampler(generator, name="policy")
        # In the asynchronous loop the policy's generator is never idle, so a judge must not wait for that.
        defer_to = None if asynchronous.enabled else sampler
        judges = build_judges(config.env.nemo_gym, wanted.judges, defer_to=defer_to, seed=config.grpo.seed)
        for judge in judges.values():
            if isinstance(judge, HttpJudge):
                resources.callback(judge.close)
        environments = EnvironmentSet(config.env.nemo_gym.environments, judges, only=config.env.only_environment)
        stepwise: list[StepwiseJudge] = [j for j in judges.values() if isinstance(j, GeneratorJudge | HttpJudge)]
        where = {"backend": "process"}
        return Parts(policy, generator, sampler, stepwise, environments, resources.pop_all(), where, teachers)
