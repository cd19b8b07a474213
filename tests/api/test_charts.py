from __future__ import annotations

import re

import pytest

from nemotron_steps.api.charts import Plot, charts
from nemotron_steps.errors import UnknownNameError


def test_a_chart_says_what_its_curve_came_to() -> None:
    plot = Plot({"loss": {1: 2.0, 2: 0.5}, "none": {}})
    assert re.findall(r"<span>(\w+)</span><b>([^<]*)</b>", plot.html) == [("loss", "0.5")]


def test_named_charts_are_those_and_unnamed_ones_what_tells_most() -> None:
    metrics = {name: {1: 1.0} for name in ("lr", "loss", "entropy", "reward/mean")}
    assert list(charts(metrics, (), "toy").series) == ["reward/mean", "loss", "entropy"]
    assert list(charts(metrics, ("lr", "loss"), "toy").series) == ["lr", "loss"]
    with pytest.raises(UnknownNameError, match="toy reported no metric 'los'"):
        charts(metrics, ("los",), "toy")
