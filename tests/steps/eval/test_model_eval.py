"""What eval/model_eval writes of answers that are graded already."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemotron_steps.config.schema.eval import EvalConfig
from nemotron_steps.errors import ConfigError
from nemotron_steps.runs.context import plain_context
from nemotron_steps.steps import evaluation


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
