"""Made-up rows of tool use: how many tools a request comes with."""

from __future__ import annotations

import json

from nemotron_steps.config.schema.tool_preferences import ToolTasksSource
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
