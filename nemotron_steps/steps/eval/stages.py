"""eval/stages: the held-out reward of several checkpoints on several sets of prompts, as a table.

After a chain of training stages it says what each of them gained on its own prompts, and what became of the earlier
ones'. Every checkpoint answers every set; a checkpoint's row is kept in the work folder, so a killed run goes on
with the next one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nemotron_steps.artifacts.files import write_atomic
from nemotron_steps.artifacts.models import split_file
from nemotron_steps.config.schema.eval import StagesEvalConfig
from nemotron_steps.engine.rollouts.data import PromptRow, read_rows
from nemotron_steps.engine.rollouts.evaluation import summarize
from nemotron_steps.errors import ConfigError, DataError
from nemotron_steps.runs.context import StepContext
from nemotron_steps.steps.eval.grading import grade


def run(context: StepContext[StagesEvalConfig]) -> None:
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
                f"there is no set of prompts '{name}'",
                where=f"evaluation.{key}.{name}",
                expected=f"one of {', '.join(sets)}",
                hints=(f"~evaluation.{key}.{name}", f"--input prompts.{name}=PATH"),
            )
    table: dict[str, dict[str, Any]] = {}
    for done, (name, folder) in enumerate(config.models.items()):
        kept = context.work / f"{done}.json"
        if not kept.is_file():
            context.tracker.progress(f"grading {name}", done, len(config.models))
            write_atomic(kept, json.dumps(_row(Path(folder), sets, context)).encode())
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
    known = [error for error in errors if math.isfinite(error)]  # of a single prompt there is none
    spread = {"largest_standard_error": max(known)} if known else {}
    context.tracker.summary({"heldout_reward": rewards, **spread})


def _row(
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
    """The held-out rows of prepared prompts, else their validation rows: published blends hold no others out."""
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
