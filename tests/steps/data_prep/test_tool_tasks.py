"""Made-up rows of tool use: how many tools a request comes with."""

from __future__ import annotations

import json

import pytest

from nemotron_steps.config.schema.tool_preferences import ToolTasksSource
from nemotron_steps.errors import DataError
from nemotron_steps.steps.data_prep import tool_preference_prep as tool_tasks
from nemotron_steps.steps.data_prep.tool_preference_prep import tool_rows


def test_arguments_are_of_the_types_that_the_tool_names_and_stand_in_the_request() -> None:
    for row in tool_rows(ToolTasksSource(offered=2, unanswerable_share=0.0), 200, seed=2):
        action, params = row["expected_action"], row["responses_create_params"]
        (tool,) = [each for each in params["tools"] if each["name"] == action["name"]]
        arguments, properties = json.loads(action["arguments"]), tool["parameters"]["properties"]
        assert set(arguments) == set(properties) == set(tool["parameters"]["required"])
        types = {"integer": int, "number": float, "string": str}
        assert {name: type(value) for name, value in arguments.items()} == {
            name: types[schema["type"]] for name, schema in properties.items()
        }
        assert all(str(value) in params["input"][0]["content"] for value in arguments.values())


def test_more_requests_than_there_are_are_refused_with_how_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        tool_tasks, "_TASKS", tuple(t for t in tool_tasks._TASKS if t.name in ("set_timer", "play_song"))
    )
    with pytest.raises(DataError, match="too few different tool requests") as caught:
        tool_rows(ToolTasksSource(offered=1, unanswerable_share=0.0), 200, seed=0)
    assert caught.value.found == str(89 + 7) and caught.value.hints == ("rows.train=48",)
