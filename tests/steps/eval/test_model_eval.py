"""What eval/model_eval writes of answers that are graded already."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest

from nemotron_steps.config.schema.eval import EvalConfig
from nemotron_steps.engine.types import RolloutGroup
from nemotron_steps.runs.context import plain_context
from nemotron_steps.steps.eval import model_eval
from tests.engine.engine_samples import rollout


def test_an_answer_that_nobody_graded_has_no_reward_but_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"n": 0}\n{"n": 1}\n{"n": 2}\n')
    asked = {}

    def grade(folder, sets, config, reporter, *, environment):
        asked.update(rows=[row.row["n"] for row in sets["prompts"]], environment=environment)
        failed = rollout("a", 1, reward=math.nan, failure="judge_unavailable")
        groups = [RolloutGroup("a", 0, [rollout("a", 0, reward=0.5), failed], 0)]
        return {"prompts": groups}, SimpleNamespace(prompt_text=lambda rollout: "asked")

    monkeypatch.setattr(model_eval, "grade", grade)
    config = EvalConfig.model_validate(
        {
            "model": str(tmp_path),
            "data": {"data_path": str(rows)},
            "evaluation": {"max_prompts": 2, "environment": "mcqa"},
        }
    )
    context = plain_context(config, tmp_path / "run", outputs={"report": "eval_report"})
    model_eval.run(context)
    assert asked == {"rows": [0, 1], "environment": "mcqa"}
    report = context.outputs["report"].path
    answers = [json.loads(line, parse_constant=pytest.fail) for line in (report / "answers.jsonl").open()]
    assert [(a["reward"], a["failure"]) for a in answers] == [(0.5, None), (None, "judge_unavailable")]
    assert context.outputs["report"].attributes["reward"] == 0.5
