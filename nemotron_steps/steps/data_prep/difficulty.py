"""data_prep/difficulty: prompts sorted by how often a policy solves them, the always solved ones left out. A killed run
goes on: rates are kept in `work` as they come."""

import asyncio
import csv
import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Literal

from nemotron_steps.config.schema.eval import DifficultyConfig, DifficultySettings
from nemotron_steps.engine.grpo.filters import FailureWatch
from nemotron_steps.engine.placement.run import SamplingWanted, place_sampling
from nemotron_steps.engine.rollouts.collector import RolloutCollector
from nemotron_steps.engine.rollouts.data import PromptRow, PromptRows, read_rows
from nemotron_steps.engine.rollouts.evaluation import PassRate, RateJournal, by_difficulty, rate_prompts
from nemotron_steps.engine.setup.backends import build_collector
from nemotron_steps.engine.setup.rows import Needs, check_rows
from nemotron_steps.engine.types import RolloutGroup
from nemotron_steps.errors import ConfigError, DataError
from nemotron_steps.models.chat import ChatFormat
from nemotron_steps.runs.context import StepContext
from nemotron_steps.steps.data_prep.blends.splits import PROMPT_FILES, Split

ORDER = "pass_rate"
"""The attribute `order` of what this step writes; sorted data is not to be shuffled (resolver/checks.py)."""
FIELD = "curriculum"
_REPORT_EVERY = 50

Outcome = Literal["kept", "always_solved", "never_solved", "unrated"]


def run(context: StepContext[DifficultyConfig]) -> None:
    """Write the `curriculum` output: the splits, and pass_rates.csv with every training prompt."""
    config = context.config
    if config.model is None or config.data.train.data_path is None:
        missing, port = ("model", "model") if config.model is None else ("data.train.data_path", "prompts")
        raise ConfigError("nothing to sample", where=missing, hints=[f"--input {port}=PATH"])
    rows = read_rows(config.data.train.data_path)
    only = config.env.only_environment
    served = config.generation.vllm_cfg.expose_http_server
    needs = check_rows(config.env, rows, only=only, policy_served=served, policy=config.model)
    journal = RateJournal(context.work / "pass_rates.jsonl")
    try:
        if len(journal.rates) < len(rows):
            _rate(context, rows, needs, journal)
        _write(context, rows, journal)
    finally:
        journal.close()


def _rate(context: StepContext[DifficultyConfig], rows: PromptRows, needs: Needs, journal: RateJournal) -> None:
    config, settings = context.config, context.config.difficulty
    folder = Path(config.model or "")
    chat = ChatFormat.from_folder(folder)
    parts = place_sampling(
        config.cluster,
        SamplingWanted(
            hf_folder=folder,
            chat=chat,
            generation=config.generation,
            env=config.env,
            judges=needs.judges,
            max_total_length=settings.max_total_sequence_length,
            precision=settings.precision,
            seed=settings.seed,
        ),
    )
    with parts.resources:
        context.tracker.event("placement", **parts.where)
        collector = build_collector(
            config.generation,
            chat,
            parts.sampler,
            parts.environments,
            needs,
            seed=settings.seed,
            max_total_length=settings.max_total_sequence_length,
            longest=settings.max_total_sequence_length,
            max_turns=settings.max_rollout_turns,
            reporter=context.tracker,
            resources=parts.resources,
        )
        watch = FailureWatch(64, settings.samples_per_prompt, len(rows) - len(journal.rates))

        def rated(number: int, prompt: PromptRow, group: RolloutGroup) -> None:
            watch.saw(number, prompt, group)
            journal.add(PassRate.of(prompt.index, group, settings.pass_reward))
            done = len(journal.rates)
            if done % _REPORT_EVERY == 0 or done == len(rows):
                context.tracker.progress("sampling prompts", done, len(rows))
                context.tracker.metrics(done, journal.figures() | watch.metrics())

        async def rate() -> None:
            await parts.environments.start()
            try:
                await rate_prompts(
                    collector,
                    (rows[place] for place in _unrated(rows, collector, journal)),
                    samples=settings.samples_per_prompt,
                    at_once=settings.prompts_at_once or _enough(config),
                    began=watch.began,
                    rated=rated,
                )
            finally:
                await parts.environments.close()

        context.tracker.progress("sampling prompts", len(journal.rates), len(rows))
        asyncio.run(rate())


def _unrated(rows: PromptRows, collector: RolloutCollector, journal: RateJournal) -> list[int]:
    """Places to be rated. Prompts of an environment that compares answers, which has no pass mark, get no rate."""
    left = []
    for prompt in rows:
        if prompt.index in journal.rates:
            continue
        if collector.environment_of(prompt).judges_groups:
            journal.add(PassRate(prompt.index, graded=0, passed=0, mean_reward=None, answer_tokens=0.0))
        else:
            left.append(prompt.index)
    return left


def _enough(config: DifficultyConfig) -> int:
    """Prompts whose samples fill the generators twice, so that slots that fall free are taken at once."""
    cluster = config.cluster
    generators = 1
    if cluster.backend == "ray":
        gpus = cluster.num_nodes * cluster.gpus_per_node // config.generation.devices_per_generator
        generators = max(1, gpus or cluster.policy_workers or 1)
    vllm = config.generation.backend == "vllm"
    slots = config.generation.vllm_cfg.max_num_seqs if vllm else config.generation.max_sequences
    return max(2, 2 * generators * slots // config.difficulty.samples_per_prompt)


def _outcome(rate: PassRate, settings: DifficultySettings) -> Outcome:
    if rate.rate is None:
        return "unrated"
    if rate.passed == rate.graded and settings.drop_always_solved:
        return "always_solved"
    return "never_solved" if rate.passed == 0 and settings.drop_never_solved else "kept"


def _write(context: StepContext[DifficultyConfig], rows: PromptRows, journal: RateJournal) -> None:
    config, slot = context.config, context.outputs["curriculum"]
    settings, rates = config.difficulty, journal.rates
    outcomes = {place: _outcome(rates[place], settings) for place in range(len(rows))}
    kept = [place for place, outcome in outcomes.items() if outcome in ("kept", "unrated")]
    counts = Counter[str](outcomes.values())
    if not kept:
        dropped = [name for name in ("always_solved", "never_solved") if counts[name]]
        raise DataError(
            "no prompt is left",
            where=config.data.train.data_path,
            found=", ".join(f"{counts[name]} {name.replace('_', ' ')}" for name in dropped),
            hints=[
                *(f"difficulty.drop_{name}=false" for name in dropped),
                f"difficulty.samples_per_prompt={2 * settings.samples_per_prompt}",
            ],
        )
    with (slot.path / PROMPT_FILES["train"]).open("w", encoding="utf-8") as file:
        for place in by_difficulty(rates, kept, easy_first=settings.order == "easy_first"):
            rate = rates[place]
            found = {"pass_rate": rate.rate, "mean_reward": rate.mean_reward, "samples": rate.graded}
            file.write(json.dumps({**rows[place].row, FIELD: found}, ensure_ascii=False) + "\n")
    others: dict[Split, str | None] = {
        "validation": config.data.validation.data_path,
        "heldout": config.data.heldout.data_path,
    }
    for split, path in others.items():
        if path is not None:
            shutil.copyfile(path, slot.path / PROMPT_FILES[split])
    with (slot.path / "pass_rates.csv").open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file)
        table.writerow(["line", "pass_rate", "passed", "graded", "mean_reward", "answer_tokens", "outcome"])
        for prompt in rows:
            rate = rates[prompt.index]
            line = prompt.where.rpartition(":")[2]
            share = "" if rate.rate is None else f"{rate.rate:.4f}"
            reward = "" if rate.mean_reward is None else f"{rate.mean_reward:.4f}"
            table.writerow(
                [line, share, rate.passed, rate.graded, reward, f"{rate.answer_tokens:.1f}", outcomes[prompt.index]]
            )
    slot.attributes["order"] = ORDER
    context.tracker.summary(
        {"prompts": len(rows), "kept": len(kept)}
        | {name: counts[name] for name in ("always_solved", "never_solved", "unrated") if counts[name]}
        | journal.figures()
    )
