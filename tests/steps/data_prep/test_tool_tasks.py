"""Made-up rows of tool use: how many tools a request comes with."""

from __future__ import annotations

import pytest

from nemotron_steps.config.schema.tool_preferences import ToolTasksSource
from nemotron_steps.steps.data_prep.tool_tasks import tool_rows


@pytest.mark.parametrize("offered", [1, 3, 6])
def test_as_many_tools_are_offered_as_asked_for_whether_or_not_one_of_them_fits(offered: int) -> None:
    rows = tool_rows(ToolTasksSource(offered=offered, unanswerable_share=0.5), 40, seed=1)
    assert {row["expected_action"]["type"] for row in rows} == {"function_call", "message"}
    for row in rows:
        names = {tool["name"] for tool in row["responses_create_params"]["tools"]}
        assert len(names) == len(row["responses_create_params"]["tools"]) == offered
        right = row["expected_action"].get("name")
        assert right is None or right in names
