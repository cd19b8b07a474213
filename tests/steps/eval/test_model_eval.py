"""What eval/model_eval writes of answers that are graded already."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nemotron_steps.config.schema.eval import EvalConfig
from nemotron_steps.engine.types import RolloutGroup
from nemotron_steps.environments.judged.judge_transcripts import JUDGE_NOTES
from nemotron_steps.errors import ConfigError
from nemotron_steps.runs.context import plain_context
from nemotron_steps.steps import evaluation
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
        first = rollout("a", 0, reward=0.5)
        first.metadata.update({JUDGE_NOTES: [{"verdict": "A"}], "other": 1})
        groups = [RolloutGroup("a", number, [first, failed], 0) for number in (0, 7, 8)]
        return {"prompts": groups}, SimpleNamespace(
            shown=lambda rollout, whole=True: {"prompt": "asked", "response": "one<|end|>" if whole else "one"}
        )

    monkeypatch.setattr(evaluation, "grade", grade)
    config = EvalConfig.model_validate(
        {
            "model": str(tmp_path),
            "data": {"data_path": str(rows)},
            "evaluation": {"max_prompts": 2, "environment": "mcqa"},
        }
    )
    records: list[dict[str, Any]] = []
    outputs = {"report": "eval_report"}
    context = plain_context(config, tmp_path / "run", outputs=outputs, listener=records.append)
    evaluation.model_eval(context)
    assert asked == {"rows": [0, 1], "environment": "mcqa"}
    report = context.outputs["report"].path
    answers = [json.loads(line, parse_constant=pytest.fail) for line in (report / "answers.jsonl").open()]
    assert [(a["reward"], a["failure"]) for a in answers] == [(0.5, None), (None, "judge_unavailable")] * 3
    assert [a["prompt_index"] for a in answers] == [0, 0, 7, 7, 8, 8]
    assert (answers[0]["prompt"], answers[0]["response"]) == ("asked", "one")
    assert answers[0][JUDGE_NOTES] == [{"verdict": "A"}] and "other" not in answers[0]
    assert context.outputs["report"].attributes["reward"] == 0.5
    shown = [{**answers[place], "response": "one<|end|>"} for place in (0, 2)]  # a report has the special tokens
    assert [record["sample"] for record in records if record["kind"] == "sample"] == shown
    (summary,) = [record["values"] for record in records if record["kind"] == "summary"]
    assert summary == {"reward": 0.5, "standard_error": 0.0, "samples": 3, "ungraded": 3}


@pytest.mark.parametrize(
    ("given", "where", "hint"),
    [
        ({}, "model", "--input model=PATH"),
        ({"model": "x"}, "data.data_path", "--input prompts=FOLDER   # with heldout.jsonl, the split that is graded"),
    ],
)
def test_what_is_missing_of_an_evaluation_is_asked_for(
    tmp_path: Path, given: dict[str, str], where: str, hint: str
) -> None:
    context = plain_context(EvalConfig.model_validate(given), tmp_path, outputs={"report": "eval_report"})
    with pytest.raises(ConfigError, match="nothing to evaluate") as caught:
        evaluation.model_eval(context)
    assert (caught.value.where, caught.value.hints[0]) == (where, hint)
