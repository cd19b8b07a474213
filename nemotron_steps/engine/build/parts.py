"""The live parts of a run, in this process or on Ray: the same classes either way (`cluster.backend`)."""

from __future__ import annotations

from collections.abc import Set
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemotron_steps.config.layout.mends import refuse
from nemotron_steps.config.layout.sizes import sizes_of
from nemotron_steps.config.schema.rl import RlConfig
from nemotron_steps.engine.generation.sampler import AsyncSampler
from nemotron_steps.engine.grpo.step import needs_reference_logprobs
from nemotron_steps.engine.rollouts.judges import GeneratorJudge, StepwiseJudge
from nemotron_steps.engine.losses.loss import SampledFrom
from nemotron_steps.engine.losses.policy_gradient import PolicyGradientLoss
from nemotron_steps.engine.build.backends import build_generator, build_judges, build_policy
from nemotron_steps.engine.types import Generator, Policy
from nemotron_steps.environments.environment_set import EnvironmentSet
from nemotron_steps.environments.judged.judges import HttpJudge
from nemotron_steps.models.architecture import facts_of
from nemotron_steps.models.chat import ChatFormat


@dataclass
class Parts:
    """What a run is made of. `resources` frees it."""

    policy: Policy
    generator: Generator
    sampler: AsyncSampler
    judges: list[StepwiseJudge]
    environments: EnvironmentSet
    resources: ExitStack
    placement: dict[str, Any]
    """Where everything is, for the journal."""


def build_parts(
    config: RlConfig,
    hf_folder: Path,
    chat: ChatFormat,
    needed_judges: Set[str],
    *,
    total_steps: int,
    max_total_length: int,
) -> Parts:
    """Load every part where `cluster` puts it; the generator has the policy's weights.

    Args:
        hf_folder: config.json and tokenizer of the policy.
        needed_judges: roles that the rows' environments ask.
        total_steps: optimizer steps of the run.
        max_total_length: longest sequence of the run.

    Raises:
        ConfigError: the layout does not come out even over the model and the devices (config/layout).
        UnsupportedError: a part cannot do what the config asks of it, or is not where it should be.
    """
    refuse(sizes_of(config), facts_of(hf_folder))
    if config.cluster.backend == "ray":
        from nemotron_steps.engine.placement.on_ray import place

        placed = place(
            config, hf_folder, sorted(needed_judges), total_steps=total_steps, max_total_length=max_total_length
        )
        return Parts(
            placed.policy,
            placed.generator,
            AsyncSampler(placed.generator, name="policy"),
            list(placed.judges),
            placed.environments,
            placed.resources,
            placed.where(),
        )
    return _in_this_process(config, hf_folder, chat, needed_judges, total_steps, max_total_length)


def _in_this_process(
    config: RlConfig,
    hf_folder: Path,
    chat: ChatFormat,
    needed_judges: Set[str],
    total_steps: int,
    max_total_length: int,
) -> Parts:
    assert config.policy.checkpoint is not None, "checked by the caller"
    asynchronous = config.grpo.async_grpo
    policy = build_policy(
        config.policy,
        Path(config.policy.checkpoint),
        PolicyGradientLoss(config.loss_fn, SampledFrom.of(config.policy.generation)),
        reference=needs_reference_logprobs(config.loss_fn),
        total_steps=total_steps,
    )
    generator = build_generator(
        hf_folder,
        config.policy.generation,
        chat,
        max_total_length=max_total_length,
        precision=config.policy.precision,
        weights=policy.weights(),
        asynchronous=asynchronous,
    )
    with ExitStack() as resources:
        resources.callback(generator.close)
        sampler = AsyncSampler(generator, name="policy")
        # In the asynchronous loop the policy's generator is never idle, so a judge must not wait for that.
        defer_to = None if asynchronous.enabled else sampler
        judges = build_judges(config.env.nemo_gym, set(needed_judges), defer_to=defer_to, seed=config.grpo.seed)
        for judge in judges.values():
            if isinstance(judge, HttpJudge):
                resources.callback(judge.close)
        only = None if config.env.should_use_nemo_gym else config.env.environment
        environments = EnvironmentSet(config.env.nemo_gym.environments, judges, only=only)
        stepwise: list[StepwiseJudge] = [j for j in judges.values() if isinstance(j, GeneratorJudge | HttpJudge)]
        return Parts(policy, generator, sampler, stepwise, environments, resources.pop_all(), {"backend": "process"})
