"""The evaluation steps: a model's answers to rows, graded with reward environments (eval/model_eval), or several
checkpoints on several sets of prompts (eval/stages), where a killed run goes on with the next checkpoint."""

import asyncio
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from nemotron_steps.artifacts.files import write_atomic
from nemotron_steps.artifacts.models import split_file
from nemotron_steps.config.schema.eval import EvalConfig, GradingConfig, StagesEvalConfig
from nemotron_steps.engine.generation.sampler import AsyncSampler
from nemotron_steps.engine.grpo.filters import refuse_failures
from nemotron_steps.engine.reporting import Reporter
from nemotron_steps.engine.rollouts.collector import RolloutCollector
from nemotron_steps.engine.rollouts.data import PromptRow, read_rows
from nemotron_steps.engine.rollouts.evaluation import summarize
from nemotron_steps.engine.setup.backends import build_collector, build_generator, build_judges
from nemotron_steps.engine.setup.rows import check_rows
from nemotron_steps.engine.types import RolloutGroup
from nemotron_steps.environments.environment_set import EnvironmentSet
from nemotron_steps.environments.judged.judge_transcripts import JUDGE_NOTES
from nemotron_steps.errors import ConfigError, DataError, StepsError
from nemotron_steps.models.architecture import facts_of
from nemotron_steps.models.chat import ChatFormat
from nemotron_steps.runs.context import StepContext

_OF_POLICY = "policy.generation."
_LONGEST = 4096
"""Tokens of a prompt and its answer, where neither the config nor the model says less."""


def grade(
    folder: Path,
    sets: Mapping[str, Sequence[PromptRow]],
    config: GradingConfig,
    reporter: Reporter,
    *,
    environment: str | None,
) -> tuple[dict[str, list[RolloutGroup]], RolloutCollector]:
    """Groups of graded answers of one model to each set of rows, and the collector that can show their prompts."""
    settings = config.evaluation
    every = [row for rows in sets.values() for row in rows]
    only = environment or config.env.only_environment
    served = config.generation.vllm_cfg.expose_http_server
    needs = check_rows(config.env, every, only=only, policy_served=served, policy=folder)
    chat = ChatFormat.from_folder(folder)
    facts = facts_of(folder)
    longest = settings.max_total_sequence_length or min(_LONGEST, (facts and facts.positions) or _LONGEST)
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


def model_eval(context: StepContext[EvalConfig]) -> None:
    """Write the `report` output: report.json and answers.jsonl."""
    config = context.config
    if config.model is None or config.data.data_path is None:
        missing = "model" if config.model is None else "data.data_path"
        prompts = "--input prompts=FOLDER   # its heldout.jsonl is graded, else its validation rows, else all rows"
        mends = ["--input model=PATH"] if config.model is None else [prompts, "data.data_path=FILE"]
        raise ConfigError("nothing to evaluate", where=missing, hints=mends)
    source, every = Path(config.data.data_path), read_rows(config.data.data_path)
    rows = every[: config.evaluation.max_prompts]
    context.tracker.progress(f"grading {len(rows)} prompts of {source.name}", 0, None)
    only = config.evaluation.environment
    graded, collector = grade(Path(config.model), {"prompts": rows}, config, context.tracker, environment=only)
    groups = graded["prompts"]
    result = summarize(groups)
    slot = context.outputs["report"]
    (slot.path / "report.json").write_text(json.dumps(result.to_dict(), indent=2) + "\n")
    with (slot.path / "answers.jsonl").open("w") as file:
        for group in groups:
            for rollout in group.rollouts:
                record = {
                    "prompt_index": group.prompt_index,
                    **collector.shown(rollout, whole=False),
                    "reward": None if rollout.failure else rollout.reward,
                    "failure": rollout.failure,
                    "components": rollout.components,
                    **{key: notes for key, notes in rollout.metadata.items() if key == JUDGE_NOTES},
                }
                file.write(json.dumps(record) + "\n")
                if group.prompt_index < 8 and rollout.index == 0:
                    context.tracker.sample({**record, **collector.shown(rollout)})
    slot.attributes["reward"] = result.reward
    context.tracker.metrics(0, result.metrics("heldout"))
    shown = ("reward", "standard_error", "samples", *(("ungraded",) if result.ungraded else ()))
    graded_rows = {"graded_prompts": f"{len(rows)} of {len(every)}", "split": source.stem.removesuffix("-split")}
    context.tracker.summary({figure: getattr(result, figure) for figure in shown} | graded_rows)


def eval_stages(context: StepContext[StagesEvalConfig]) -> None:
    """Write the `report` output: report.json with `metrics`, CHECKPOINT/SET → reward, and `figures`."""
    config = context.config
    if not config.models or not config.prompts:
        port = "prompts" if config.models else "models"
        raise ConfigError("nothing to evaluate", where=port, hints=[f"--input {port}.NAME=PATH"])
    limits = config.evaluation.max_prompts_of
    sets = {
        name: _heldout(name, Path(folder))[: limits.get(name, config.evaluation.max_prompts)]
        for name, folder in config.prompts.items()
    }
    for key, of_sets in (("environments", config.evaluation.environments), ("max_prompts_of", limits)):
        for name in of_sets.keys() - sets.keys():
            raise ConfigError(
                f"unknown set of prompts '{name}'",
                where=f"evaluation.{key}.{name}",
                expected=f"one of {', '.join(sets)}",
                hints=(f"~evaluation.{key}.{name}", f"--input prompts.{name}=PATH"),
            )
    table: dict[str, dict[str, Any]] = {}
    for done, (name, folder) in enumerate(config.models.items()):
        kept = context.work / f"{done}.json"
        if not kept.is_file():
            context.tracker.progress(f"grading {name}", done, len(config.models))
            write_atomic(kept, json.dumps(_figures(Path(folder), sets, context)).encode())
        figures = json.loads(kept.read_text())
        table[name] = {each: figures[each] for each in sets}
        context.tracker.metrics(done, {f"heldout/{each}/reward": row["reward"] for each, row in table[name].items()})
    slot = context.outputs["report"]
    rewards = {name: {each: figures["reward"] for each, figures in row.items()} for name, row in table.items()}
    metrics = {f"{name}/{each}": reward for name, row in rewards.items() for each, reward in row.items()}
    (slot.path / "report.json").write_text(json.dumps({"metrics": metrics, "figures": table}, indent=2) + "\n")
    last = next(reversed(rewards.values()))
    slot.attributes["reward"] = sum(last.values()) / len(last)
    errors = [figures["standard_error"] for row in table.values() for figures in row.values()]
    known = [error for error in errors if math.isfinite(error)]  # a single prompt has no standard error
    spread = {"largest_standard_error": max(known)} if known else {}
    context.tracker.summary({"heldout_reward": rewards, **spread})


def _figures(
    folder: Path, sets: Mapping[str, Sequence[PromptRow]], context: StepContext[StagesEvalConfig]
) -> dict[str, Any]:
    """Set → figures of one model; sets that the same environment grades are answered by one generator."""
    settings = context.config.evaluation
    only = {name: settings.environments.get(name, settings.environment) for name in sets}
    figures: dict[str, Any] = {}
    for environment in dict.fromkeys(only.values()):
        together = {name: rows for name, rows in sets.items() if only[name] == environment}
        graded, _ = grade(folder, together, context.config, context.tracker, environment=environment)
        figures |= {name: summarize(groups).to_dict() for name, groups in graded.items()}
    return figures


def _heldout(name: str, folder: Path) -> Sequence[PromptRow]:
    file = next((f for split in ("heldout", "validation") if (f := split_file(folder, split)) is not None), None)
    rows: Sequence[PromptRow] = read_rows(str(file)) if file is not None and file.stat().st_size else ()
    if not rows:
        raise DataError(
            f"prompts '{name}' have neither held-out nor validation rows",
            where=str(folder),
            expected="heldout.jsonl or val-split.jsonl with rows",
            hints=("rows.heldout=100",),
        )
    return rows
