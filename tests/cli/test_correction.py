"""The corrected command of an error, and what it keeps to itself."""

from __future__ import annotations

import pytest

from nemotron_steps.cli.correction import add_corrected_command
from nemotron_steps.errors import ConfigError, PlanError


def corrected(words: list[str], *slips: tuple[str, str]) -> tuple[str, ...]:
    problems = [ConfigError("unknown key", meant=slip) for slip in slips]
    error = PlanError("a plan", problems=problems)
    add_corrected_command(error, "steps", words)
    return (*error.hints, *(hint for problem in problems for hint in problem.hints))


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("policy.hf_token", "policy.tokenizer"),
        ("judge_model.api_key", "judge_model"),
        ("judge_model.api_key", "judge_model.api_key_env"),
        ("judge_model.api_kye", "judge_model.model"),
        ("judge_model.pasword", "judge_model.path"),
    ],
)
@pytest.mark.parametrize("stage", ["", "rl.", "+", "+rl."])
def test_the_value_of_a_secret_key_is_not_offered_under_a_key_that_is_none(typed: str, meant: str, stage: str) -> None:
    assert corrected(["plan", "x", f"{stage}{typed}=hunter2hunter2"], (typed, meant)) == ()


@pytest.mark.parametrize("typed", ["judge.api_kye", "judge.apikey", "judge.api_key_"])
def test_a_key_that_was_meant_for_a_secret_one_is_corrected_without_its_value(typed: str) -> None:
    (hint,) = corrected(["plan", "x", f"{typed}=hunter2 hunter2"], (typed, "judge.api_key"))
    assert "judge.api_key=" in hint and "***" in hint and "hunter2" not in hint


def test_a_corrected_command_has_no_value_of_another_override_that_may_be_a_secret() -> None:
    words = ["plan", "x", "grpo.max_step=5", "judge.api_kye=hunter2", "judge.hf_token=hunter2"]
    (hint,) = corrected(words, ("grpo.max_step", "grpo.max_steps"))
    assert "grpo.max_steps=5" in hint and hint.count("***") == 2 and "hunter2" not in hint


def test_a_corrected_command_keeps_every_value_that_is_no_secret() -> None:
    words = ["plan", "x", "grpo.max_step=5", "model=/m/abcdefgh12345678", "--input", "data=a b"]
    hints = corrected(words, ("grpo.max_step", "grpo.max_steps"))
    assert hints == ("steps plan x grpo.max_steps=5 model=/m/abcdefgh12345678 --input 'data=a b'",)
