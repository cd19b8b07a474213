from __future__ import annotations

import json
import re
from html import unescape

from nemotron_steps.runs.report_svg import bars, curve


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
