from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from nemotron_steps.api.result import Plot, charts, result_html
from nemotron_steps.artifacts.models import Artifact
from nemotron_steps.errors import UnknownNameError


def test_a_chart_says_what_its_curve_came_to() -> None:
    plot = Plot({"loss": {1: 2.0, 2: 0.5}, "none": {}})
    assert re.findall(r"<span>(\w+)</span><b>([^<]*)</b>", plot.html) == [("loss", "0.5")]


def test_named_charts_are_those_and_unnamed_ones_what_tells_most() -> None:
    metrics = {name: {1: 1.0} for name in ("lr", "loss", "entropy", "reward/mean")}
    assert list(charts(metrics, (), "toy").series) == ["reward/mean", "loss", "entropy", "lr"]
    assert list(charts(metrics, ("lr", "loss"), "toy").series) == ["lr", "loss"]
    with pytest.raises(UnknownNameError, match="toy reported no metric 'los'"):
        charts(metrics, ("los",), "toy")


def test_a_saved_page_has_the_title_that_it_was_given(tmp_path: Path) -> None:
    page = Plot({"loss": {1: 2.0}}, "a < b").save(tmp_path / "curves.html")
    assert page == tmp_path / "curves.html" and "<title>a &lt; b</title>" in page.read_text()


def test_a_run_is_told_by_what_its_steps_took_that_ran_and_what_the_last_one_came_to() -> None:
    steps = {
        name: SimpleNamespace(state=state, seconds=seconds)
        for name, state, seconds in (
            ("a", "ran", 40.0),
            ("b", "cached", 500.0),
            ("c", "ran", 2.0),
            ("d", "failed", None),
        )
    }
    model = Artifact("t", "d", Path("/home/x"), name="m", version=1)
    summary = {"held_out": {"before": 0.25, "after": 0.75}, "by": {"x": 1, "y": 0.5}, "rows": 1234}
    result = SimpleNamespace(
        id="r1", status="failed", steps=steps, summary=summary, outputs={"model": model},
        error={"code": "E600", "what": "a < b"}, plot=lambda: Plot({}),
    )  # fmt: skip
    page = result_html(result)  # type: ignore[arg-type]
    assert "<b>r1</b> · failed · 42" in page and "<p>error[E600]: a &lt; b</p>" in page
    assert re.findall(r"<tr><td>([^<]*)</td><td>(.*?)</td></tr>", page) == [
        *(("held out", "0.25 → 0.75 (+0.5)"), ("by", "x 1, y 0.5"), ("rows", "1234"), ("model", "m:v1  /home/x"))
    ]
    result.error = None
    assert "<p>" not in result_html(result)  # type: ignore[arg-type]
