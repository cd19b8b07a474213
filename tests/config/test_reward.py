"""`reward=FILE.py:NAME`: what is not there is told with what is."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from nemotron_steps.config.schema.base import Section
from nemotron_steps.config.schema.eval import DifficultyConfig, EvalConfig, StagesEvalConfig
from nemotron_steps.config.schema.rl import RlConfig


@pytest.fixture
def rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "rewards.py"
    path.write_text("def score(completions, **columns):\n    return [0.0] * len(completions)\n")
    monkeypatch.chdir(tmp_path)
    return path


def functions(config: Any) -> list[dict[str, Any]]:
    assert config.env.only_environment == "reward_function"
    assert config.reward is None
    return config.env.nemo_gym.environments["reward_function"]["functions"]  # type: ignore[no-any-return]


@pytest.mark.parametrize("schema", [RlConfig, EvalConfig, StagesEvalConfig, DifficultyConfig])
def test_one_key_routes_every_row_to_the_function(rewards: Path, schema: type[Section]) -> None:
    (function,) = functions(schema.model_validate({"reward": "rewards.py:score"}))
    assert function["function"] == f"{rewards}:score"


def test_no_other_grader_of_an_evaluation_is_left(rewards: Path) -> None:
    given: dict[str, Any] = {"reward": "rewards.py:score", "evaluation": {"environment": "reasoning_gym"}}
    assert EvalConfig.model_validate(given).evaluation.environment is None
    given["evaluation"]["environments"] = {"rlhf": "reasoning_gym"}
    assert not StagesEvalConfig.model_validate(given).evaluation.environments


@pytest.mark.parametrize("text", [b"def score(:", b"\0"])
def test_a_file_that_is_no_python_is_refused(rewards: Path, text: bytes) -> None:
    rewards.write_bytes(text)
    with pytest.raises(ValidationError, match=r"rewards\.py, which is not valid Python"):
        RlConfig.model_validate({"reward": "rewards.py:score"})


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ("rewards.py", "reward=rewards.py:score"),
        ("reward.py:score", "reward=FILE.py:FUNCTION"),
        ("rewards.py:scor", "reward=rewards.py:score"),
        ("rewards.py:Judge", None),
        ("rewards.score", "reward=FILE.py:FUNCTION"),
        (["json:dumps", {"function": "rewards.py:scor", "weight": 2}], ""),
    ],
    ids=str,
)  # fmt: skip
def test_a_slip_is_mended_by_a_function_that_is_there(rewards: Path, given: Any, hint: str | None) -> None:
    rewards.write_text("class Judge:\n    pass\n\n\ndef _hidden():\n    pass\n\n\n" + rewards.read_text())
    values = {"reward": given}
    try:
        RlConfig.model_validate(values)
    except ValidationError as error:
        (rule,) = error.errors()[0]["ctx"]["error"].rules
        assert rule.hint == hint
    else:
        assert hint is None
