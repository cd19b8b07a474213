from __future__ import annotations

import re

from nemotron_steps.runs.report_data import StepReport
from nemotron_steps.runs.report_metrics import step_metrics


def test_a_chart_says_what_its_curve_came_to_and_a_table_what_was_measured_once() -> None:
    curves = {"loss": [(1.0, 2.0), (2.0, 0.5)], "rows": [(3.0, 7.0)]}
    html = step_metrics(StepReport("a", {}, curves=curves))
    assert re.findall(r"<span>(\w+)</span><b data-last=\"([^\"]*)\">([^<]*)</b>", html) == [("loss", "0.5", "0.5")]
    assert "<summary>1 measured once</summary>" in html
    assert re.findall(r"<tr><td>(\w+)</td><td class='value'>(.*?)</td></tr>", html) == [("rows", "7")]


def test_where_the_time_went_is_told_where_there_is_more_than_one_phase() -> None:
    assert "where the time went" not in step_metrics(StepReport("a", {}, phases={"train": 1.0}))
    html = step_metrics(StepReport("a", {}, phases={"train": 1.0, "generate": 3.0}))
    assert re.findall(r'bar-name">(\w+)<', html[html.index("where the time went") :]) == ["generate", "train"]
