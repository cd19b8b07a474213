"""Grading a model's answers to rows with reward environments: what the evaluation steps share."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from nemotron_steps.config.schema.eval import GradingConfig
from nemotron_steps.engine.generation.sampler import AsyncSampler
from nemotron_steps.engine.grpo.ungraded import refuse_failures
from nemotron_steps.engine.reporting import Reporter
from nemotron_steps.engine.rollouts.collector import RolloutCollector
from nemotron_steps.engine.rollouts.data import PromptRow
from nemotron_steps.engine.setup.backends import build_generator, build_judges
from nemotron_steps.engine.setup.collector import build_collector
from nemotron_steps.engine.setup.rows import check_rows
from nemotron_steps.engine.types import RolloutGroup
from nemotron_steps.environments.environment_set import EnvironmentSet
from nemotron_steps.errors import StepsError
from nemotron_steps.models.chat import ChatFormat

_OF_POLICY = "policy.generation."


def grade(
    folder: Path,
    sets: Mapping[str, Sequence[PromptRow]],
    config: GradingConfig,
    reporter: Reporter,
    *,
    environment: str | None,
) -> tuple[dict[str, list[RolloutGroup]], RolloutCollector]:
    """Groups of graded answers of one model to each set of rows, and the collector that can show their prompts.

    Args:
        folder: the model, a Hugging Face folder.
        sets: name → rows; each row is sampled `evaluation.samples_per_prompt` times.
        environment: grades every row; None: each row's own.

    Raises:
        JudgeUnavailableError, StepFailedError: too many answers could not be graded.
    """
    settings = config.evaluation
    every = [row for rows in sets.values() for row in rows]
    only = environment or config.env.only_environment
    served = config.generation.vllm_cfg.expose_http_server
    needs = check_rows(config.env, every, only=only, policy_served=served, policy=folder)
    chat = ChatFormat.from_folder(folder)
    longest = settings.max_total_sequence_length
    with _own_keys():
        generator = build_generator(
            folder, config.generation, chat, max_total_length=longest, precision=settings.precision
        )
    with ExitStack() as resources:
        resources.callback(generator.close)
        sampler = AsyncSampler(generator, name="policy")
        judges = build_judges(config.env.nemo_gym, needs.judges, defer_to=sampler, seed=settings.seed)
        environments = EnvironmentSet(config.env.nemo_gym.environments, judges, only=only)
        collector = build_collector(
            config.generation,
            chat,
            sampler,
            environments,
            needs,
            seed=settings.seed,
            max_total_length=longest,
            longest=longest,
            reporter=reporter,
            resources=resources,
            max_turns=settings.max_turns,
        )

        async def answers() -> dict[str, list[RolloutGroup]]:
            await environments.start()
            try:
                return {
                    name: await collector.collect(
                        rows,
                        group_ids=[f"eval/{i}" for i in range(len(rows))],
                        num_generations=settings.samples_per_prompt,
                    )
                    for name, rows in sets.items()
                }
            finally:
                await environments.close()

        graded = asyncio.run(answers())
    for name, groups in graded.items():
        refuse_failures(sets[name], groups, settings.samples_per_prompt)
    return graded, collector


@contextmanager
def _own_keys() -> Iterator[None]:
    """Generators name the keys of a policy; these steps have the same ones without its prefix, and train nothing."""
    try:
        yield
    except StepsError as error:
        own = error.where and error.where.replace(_OF_POLICY, "generation.")
        hints = (hint.replace(_OF_POLICY, "generation.") for hint in error.hints)
        error.where, error.hints = own, tuple(hint for hint in hints if "inputs.policy." not in hint)
        raise
