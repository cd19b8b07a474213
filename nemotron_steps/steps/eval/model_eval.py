"""eval/model_eval: grade a model's answers to held-out prompts with reward environments."""

from __future__ import annotations

import json
from pathlib import Path

from nemotron_steps.config.schema.eval import EvalConfig
from nemotron_steps.engine.rollouts.data import read_rows
from nemotron_steps.engine.rollouts.evaluation import summarize
from nemotron_steps.environments.judged.judge_transcripts import JUDGE_NOTES
from nemotron_steps.errors import ConfigError
from nemotron_steps.runs.context import StepContext
from nemotron_steps.steps.eval.grading import grade


def run(context: StepContext[EvalConfig]) -> None:
    """Write the `report` output: report.json and answers.jsonl."""
    config = context.config
    if config.model is None or config.data.data_path is None:
        missing = "model" if config.model is None else "data.data_path"
        mends = ["--input prompts=FOLDER   # with heldout.jsonl, the split that is graded", "data.data_path=FILE.jsonl"]
        mends = ["--input model=PATH"] if config.model is None else mends
        raise ConfigError("nothing to evaluate", where=missing, hints=mends)
    rows = read_rows(config.data.data_path)[: config.evaluation.max_prompts]
    context.tracker.progress(f"grading {len(rows)} prompts", 0, None)
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
    context.tracker.summary({figure: getattr(result, figure) for figure in shown})
