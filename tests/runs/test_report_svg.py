from __future__ import annotations

import itertools
import json
import re
from html import unescape

from nemotron_steps.runs.report.svg import Node, bars, curve, moving_average, plan_graph, thinned


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


def test_bars_are_longest_first_with_their_share_of_the_sum() -> None:
    html = bars({"save": 10.0, "generate": 30.0, "train": 20.0})
    rows = re.findall(r'bar-name">(\w+)<.*?width:([\d.]+)%.*?bar-value">(.*?) <em>(\d+) %', html)
    assert rows == [
        ("generate", "100.00", "30 s", "50"),
        ("train", "66.67", "20 s", "33"),
        ("save", "33.33", "10 s", "17"),
    ]


def test_bars_leave_out_what_took_no_time() -> None:
    assert re.findall(r'bar-name">(\w+)<', bars({"train": 2.0, "teacher": 0.0})) == ["train"]
    assert "bar-name" in bars({"train": 0.0})


def wide(nodes: list[Node]) -> tuple[dict[str, list[float]], list[list[float]]]:
    """Node → x and y of its box, and of every edge all x and y, of the plan as wide screens have it."""
    svg = plan_graph(nodes).partition('<div class="narrow">')[0]
    boxes = re.findall(r"<title>([^<]*)</title><rect x=\"([\d.]+)\" y=\"([\d.]+)\"", svg)
    paths = re.findall(r'class="edge"[^>]* d="([^"]*)"', svg)
    return (
        {name: [float(x), float(y)] for name, x, y in boxes},
        [[float(each) for each in re.findall(r"[\d.]+", path)] for path in paths],
    )


def node(name: str, *parents: str) -> Node:
    return Node(name, name, "ran", "ran", tuple((parent, "x") for parent in parents))


def test_a_step_of_the_plan_stands_beside_the_first_that_reads_from_it() -> None:
    boxes, _ = wide([node("prompts"), node("chats"), node("sft", "chats"), node("rl", "prompts", "sft")])
    assert boxes["prompts"][0] == boxes["sft"][0] < boxes["rl"][0] and boxes["chats"][0] < boxes["sft"][0]


def test_an_edge_goes_below_the_steps_that_it_passes() -> None:
    boxes, edges = wide([node("a"), node("b", "a"), node("c", "a", "b")])
    (passing,) = [edge for edge in edges if len(edge) > 8]
    across, down = passing[0::2], passing[1::2]
    left, top = boxes["b"]
    height = 54
    inside = [y for x, y in zip(across, down, strict=True) if left <= x <= left + 220]
    assert inside and all(y > top + height for y in inside)


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


def test_a_step_stands_before_whoever_reads_from_it_through_any_of_its_inputs() -> None:
    boxes, _ = wide([node("a"), node("b"), node("x", "a"), node("c", "x", "b")])
    assert boxes["a"][0] < boxes["b"][0] == boxes["x"][0] < boxes["c"][0]


def test_three_columns_are_as_many_as_fit_the_page() -> None:
    chain = [node("a"), node("b", "a"), node("c", "b"), node("d", "c")]
    assert 'class="wide"' in plan_graph(chain[:3]) and 'class="wide"' not in plan_graph(chain)


def test_the_farther_an_edge_goes_upright_the_farther_out_it_runs() -> None:
    svg = plan_graph([node("a"), node("b", "a"), node("c", "a")]).partition('<div class="narrow">')[2]
    near, far = (float(x) for x in re.findall(r'class="edge"[^>]* d="M[\d.]+,[\d.]+ C([\d.]+),', svg))
    assert 4 <= far < near < 56
