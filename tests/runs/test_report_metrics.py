from __future__ import annotations

import re

from nemotron_steps.runs.report.data import StepReport
from nemotron_steps.runs.report.svg import arranged, headlines
from tests.runs.report_samples import metrics_of


def test_a_chart_says_what_its_curve_came_to_and_a_table_what_was_measured_once() -> None:
    curves = {"loss": [(1.0, 2.0), (2.0, 0.5)], "rows": [(3.0, 7.0)]}
    html = metrics_of(StepReport("a", {}, curves=curves))
    assert re.findall(r"<span>(\w+)</span><b data-last=\"([^\"]*)\">([^<]*)</b>", html) == [("loss", "0.5", "0.5")]
    assert "<summary>1 measured once</summary>" in html
    assert re.findall(
        r"<tr><td>(\w+)</td><td class=\"value\">(.*?) <span class=\"note\">step (\d+)</span></td></tr>", html
    ) == [("rows", "7", "3")]


def test_of_the_metrics_of_a_word_the_mean_comes_first_then_the_least_deep_then_the_shortest() -> None:
    def first(*names: str) -> str:
        return headlines(names)[0]

    assert first("reward/a", "reward/b/mean") == "reward/b/mean"
    assert first("reward/a/b", "reward/abcdef") == "reward/abcdef"
    assert first("reward/ab", "reward/b") == "reward/b"
    assert headlines(["ankle", "loss"])[0] == "loss", "two letters are a word and no part of one"
    many = [*(f"other/{at}" for at in range(12)), "loss_reward", "policy_loss_of_both"]
    assert headlines(many) == ["loss_reward", "policy_loss_of_both"], "each once, though it holds two of the words"


def test_environments_are_compared_from_the_second_on_and_the_first_kind_there_is_is_shown() -> None:
    curves = {"failure_rate/a": [(1.0, 0.5)], "response_length/a/mean": [(1.0, 9.0), (2.0, 8.0)]}
    assert arranged(StepReport("rl", {}, curves=curves)).environments == {}
    curves["failure_rate/b"] = [(1.0, 0.25)]
    html = metrics_of(StepReport("rl", {}, curves=curves))
    assert re.findall(r'class="(\w+)"( checked)?>', html[html.index("radiogroup") :])[:2] == [
        ("length", " checked"),
        ("failures", ""),
    ]
    cells = re.findall(r"<td class=\"value\">(?:(\S*) <span.*?)?</td>", html)
    assert cells == ["", "", "8", "0.5", "", "", "", "0.25"]
