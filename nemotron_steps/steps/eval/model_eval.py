"""eval/model_eval: grade a model's answers to held-out prompts with reward environments."""

from __future__ import annotations

import asyncio
import json
from contextlib import ExitStack
from pathlib import Path

from nemotron_steps.config.schema.eval import EvalConfig
from nemotron_steps.engine.backends.generator import build_generator
from nemotron_steps.engine.backends.judges import build_judges
from nemotron_steps.engine.build.collector import build_collector
from nemotron_steps.engine.build.rows import check_rows
from nemotron_steps.engine.generation.sampler import AsyncSampler
from nemotron_steps.engine.grpo.ungraded import refuse_failures
from nemotron_steps.engine.rollouts.data import read_rows
from nemotron_steps.engine.rollouts.evaluation import summarize
from nemotron_steps.environments.environment_set import EnvironmentSet
from nemotron_steps.errors import ConfigError
from nemotron_steps.models.chat import ChatFormat
from nemotron_steps.runs.context import StepContext


def run(context: StepContext[EvalConfig]) -> None:
    """Write the `report` output: report.json and answers.jsonl."""
    config = context.config
    if config.model is None or config.data.data_path is None:
        missing = "model" if config.model is None else "data.data_path"
        port = "model" if config.model is None else "prompts"
        raise ConfigError("nothing to evaluate", where=missing, hints=[f"--input {port}=PATH"])
    settings = config.evaluation
    rows = read_rows(config.data.data_path)[: settings.max_prompts]
    only = settings.environment or config.env.only_environment
    needs = check_rows(config.env, rows, only=only, policy_served=config.generation.vllm_cfg.expose_http_server)
    folder = Path(config.model)
    chat = ChatFormat.from_folder(folder)
    generator = build_generator(
        folder,
        config.generation,
        chat,
        max_total_length=settings.max_total_sequence_length,
        precision="float32",
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
            max_total_length=settings.max_total_sequence_length,
            longest=settings.max_total_sequence_length,
            reporter=context.tracker,
            resources=resources,
        )
        context.tracker.progress(f"grading {len(rows)} prompts", 0, None)

        async def grade() -> list:  # type: ignore[type-arg]
            await environments.start()
            try:
                return await collector.collect(
                    rows, group_ids=[f"eval/{i}" for i in range(len(rows))], num_generations=settings.samples_per_prompt
                )
            finally:
                await environments.close()

        groups = asyncio.run(grade())
    refuse_failures(rows, groups, settings.samples_per_prompt)
    result = summarize(groups)
    slot = context.outputs["report"]
    (slot.path / "report.json").write_text(json.dumps(result.to_dict(), indent=2) + "\n")
    with (slot.path / "answers.jsonl").open("w") as file:
        for group in groups:
            for rollout in group.rollouts:
                record = {
                    "prompt_index": group.prompt_index,
                    "prompt": collector.prompt_text(rollout),
                    "response": "\n".join(rollout.metadata.get("turn_texts", ())),
                    "reward": None if rollout.failure else rollout.reward,
                    "failure": rollout.failure,
                    "components": rollout.components,
                }
                file.write(json.dumps(record) + "\n")
                if group.prompt_index < 8 and rollout.index == 0:
                    context.tracker.sample(record)
    slot.attributes["reward"] = result.reward
    context.tracker.summary(
        {"reward": result.reward, "standard_error": result.standard_error, "samples": result.samples}
    )
