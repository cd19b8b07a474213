"""`reward=FILE.py:NAME`: what is not there is told with what is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from nemotron_steps.config.schema.rl import RlConfig


@pytest.fixture
def rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "rewards.py"
    path.write_text("def score(completions, **columns):\n    return [0.0] * len(completions)\n")
    monkeypatch.chdir(tmp_path)
    return path


@pytest.mark.parametrize("text", [b"def score(:", b"\0"])
def test_a_file_that_is_no_python_is_refused(rewards: Path, text: bytes) -> None:
    rewards.write_bytes(text)
    with pytest.raises(ValidationError, match=r"rewards\.py, which is not valid Python"):
        RlConfig.model_validate({"reward": "rewards.py:score"})


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ("rewards.py", "reward=rewards.py:score"),
        ("reward.py:score", "reward=rewards.py:score"),
        ("rewards.py:scor", "reward=rewards.py:score"),
        ("rewards.py:Judge", None),
        ("rewards.score", "reward=rewards.py:score"),
        ("nothing.py:other", "reward=FILE.py:FUNCTION"),
        (["json:dumps", {"function": "rewards.py:scor", "weight": 2}],
         "'reward=[json:dumps,{function:rewards.py:score,weight:2}]'"),
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
        assert rule.hint == (hint or "")
    else:
        assert hint is None
