from __future__ import annotations

import itertools
import json
import re
from html import unescape

from nemotron_steps.runs.report.data import StepReport
from nemotron_steps.runs.report.svg import Node, arranged, curve, headlines, moving_average, plan_graph, shares, thinned
from tests.runs.report_samples import metrics_of


def drawn(points: list[tuple[float, float]]) -> list[list[float]]:
    """[x, y, place across, place down] of the points of a curve."""
    (data,) = re.findall(r'data-points="([^"]*)"', curve(points, "loss"))
    placed: list[list[float]] = json.loads(unescape(data))
    return placed


def test_a_larger_value_is_higher_up_and_a_later_step_further_right() -> None:
    (_, _, left, low), (_, _, right, high) = drawn([(1.0, 0.0), (2.0, 1.0)])
    assert left < right and high < low, "an SVG counts from the top"


def test_the_dot_is_on_the_last_point() -> None:
    points = [(1.0, 0.5), (2.0, 2.0), (3.0, 1.0)]
    (dot,) = re.findall(r'class="dot" cx="([\d.]+)" cy="([\d.]+)"', curve(points, "loss"))
    assert [float(place) for place in dot] == drawn(points)[-1][2:]


def test_a_curve_of_twenty_four_points_is_smoothed_and_a_shorter_one_is_not() -> None:
    for count, smooth in ((23, False), (24, True)):
        svg = curve([(float(at), float(at % 2)) for at in range(count)], "loss")
        assert ('class="raw"' in svg) is smooth and svg.count('class="line"') == 1


def test_a_moving_average_is_over_as_many_points_on_both_sides() -> None:
    assert moving_average([(0.0, 0.0), (1.0, 3.0), (2.0, 9.0)]) == [(0.0, 0.0), (1.0, 4.0), (2.0, 9.0)]
    steps = [(float(at), float(at >= 50)) for at in range(100)]
    assert [x for x, y in moving_average(steps) if 0 < y < 1] == [45.0 + at for at in range(10)]


def test_what_a_pointer_can_tell_apart_is_kept_whole_and_more_is_thinned_evenly() -> None:
    points = [(float(at), 0.0) for at in range(801)]
    assert thinned(points[:400]) is not None and list(thinned(points[:400])) == points[:400]
    for count in (401, 801):
        kept = [x for x, _ in thinned(points[:count])]
        steps = {after - before for before, after in itertools.pairwise(kept)}
        assert len(kept) == 400 and kept[-1] == count - 1 and steps <= {1.0, 2.0, 3.0}


def test_a_single_point_stands_in_the_middle_of_its_axis_below_its_one_number() -> None:
    (placed,) = drawn([(5.0, 2.0)])
    assert placed[2] == 44 + (300 - 44 - 10) / 2
    svg = curve([(5.0, 2.0)], "loss")
    assert re.findall(r'text-anchor="middle">(\w+)<', svg) == ["5"] and 'text-anchor="start"' not in svg


def test_bars_are_longest_first_with_their_share_of_the_sum_and_none_for_what_took_no_time() -> None:
    assert shares({"save": 10.0, "generate": 30.0, "none": 0.0}) == [
        ("generate", 30.0, 0.75, 1),
        ("save", 10.0, 0.25, 1 / 3),
    ]
    assert [name for name, *_ in shares({"train": 0.0})] == ["train"]


def test_a_plan_has_an_edge_for_every_input_that_a_step_makes() -> None:
    """The farther it goes, the farther out it runs."""
    reads = {"a": ("",), "b": ("a",), "c": ("a", "")}
    nodes = [Node(name, "ran", "ran", tuple((parent, "x") for parent in parents)) for name, parents in reads.items()]
    near, far = (float(x) for x in re.findall(r'class="edge"[^>]* d="M[\d.]+,[\d.]+ C([\d.]+),', plan_graph(nodes)))
    assert 4 <= far < near < 56


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
