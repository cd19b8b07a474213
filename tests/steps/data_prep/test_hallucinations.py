"""Made-up rows of tool use, and what a made-up call is filled with, kind by kind."""

import json
import random
from typing import Any

import pytest

from nemotron_steps.config.schema.tool_preferences import ToolTasksSource
from nemotron_steps.errors import DataError
from nemotron_steps.steps.data_prep import tool_preference_prep as tool_tasks
from nemotron_steps.steps.data_prep.tool_preference_prep import HallucinationMaker, tool_rows


def row(*tools: dict[str, Any], **arguments: Any) -> dict[str, Any]:
    """A row that expects a call of `f`, or a message where no arguments are given."""
    call = {"type": "function_call", "name": "f", "arguments": json.dumps(arguments)}
    return {
        "responses_create_params": {"input": [{"role": "user", "content": "Go."}], "tools": list(tools)},
        "expected_action": call if arguments else {"type": "message", "content": "No."},
    }


def tool(required: list[str] | None = None, **properties: Any) -> dict[str, Any]:
    needed = list(properties) if required is None else required
    return {"name": "f", "parameters": {"type": "object", "properties": properties, "required": needed}}


def made(kind: Any, rows: list[dict[str, Any]], times: int = 40) -> list[Any]:
    """What is made of the first row, drawn often."""
    maker = HallucinationMaker(rows)
    return [maker.make(kind, rows[0], random.Random(seed)) for seed in range(times)]


def test_what_the_environment_would_reward_is_no_rejected_answer() -> None:
    alike = [row(tool(x={}), x="one two three"), row(tool(x={}), x="two three four")]
    assert {calls[0][1]["x"] == "two three four" for calls in made("made_up_value", alike) if calls} <= {False}
    assert 5 not in {calls[0][1]["x"] for calls in made("made_up_value", [row(tool(x={}), x=5)])}


def test_more_requests_than_there_are_are_refused_with_how_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool_tasks, "_TASKS", tuple(t for t in tool_tasks._TASKS if t[0] in ("set_timer", "play_song")))
    with pytest.raises(DataError, match="too few different tool requests") as caught:
        tool_rows(ToolTasksSource(offered=1, unanswerable_share=0.0), 200, seed=0)
    assert caught.value.found == str(89 + 7) and caught.value.hints == ("rows.train=48",)
