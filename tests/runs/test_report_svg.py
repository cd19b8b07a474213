from __future__ import annotations

import json
import re
from html import unescape

from nemotron_steps.runs.report_svg import Node, bars, curve, plan_graph


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
