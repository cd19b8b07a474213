from __future__ import annotations

import re

from nemotron_steps.runs.report.data import RunReport, StepReport
from nemotron_steps.runs.report.page import render_comparison
from tests.runs.report_samples import run_report

Points = list[tuple[float, float]]


def run(run_id: str, **curves: dict[str, Points]) -> RunReport:
    """A run of steps with these curves each."""
    return run_report(*(StepReport(key, {}, curves=each) for key, each in curves.items()), id=run_id)


def test_the_table_has_each_runs_last_value_and_a_gap_where_it_has_none() -> None:
    runs = [
        run("one", train={"loss": [(1.0, 0.5), (2.0, 0.25)], "lr": [(1.0, 0.1)]}),
        run("two", train={"loss": [(1.0, 4.0), (2.0, 3.0)]}),
    ]
    page = render_comparison(runs)
    assert re.findall(r"<th>(.*?)</th>", page) == ["metric", "one", "two"]
    rows = re.findall(r'<tr><td>(.*?)</td><td class="value">(.*?)</td><td class="value">(.*?)</td></tr>', page)
    assert rows == [
        ("loss", '0.25 <span class="note">step 2</span>', '3 <span class="note">step 2</span>'),
        ("lr", '0.1 <span class="note">step 1</span>', ""),
    ]


def test_a_step_that_one_run_alone_has_is_not_compared() -> None:
    shared = {"loss": [(1.0, 0.5)]}
    page = render_comparison([run("one", train=shared, make=shared), run("two", train=shared, evaluate=shared)])
    assert re.findall(r"<h2>(\w+)</h2>", page) == ["train"]
    assert "no step is in two of the runs" in render_comparison([run("one", train=shared), run("two", make=shared)])


def test_curves_are_on_one_scale_that_goes_up_and_to_the_right() -> None:
    page = render_comparison(
        [run("one", train={"loss": [(1.0, 0.0), (3.0, 2.0)]}), run("two", train={"loss": [(2.0, 1.0), (3.0, 1.0)]})]
    )
    one, two = (
        [tuple(map(float, point.split(","))) for point in path.split("L")]
        for path in re.findall(r'<path class="line" style="[^"]*" d="M([^"]*)"', page)
    )
    assert one[0][0] < two[0][0] < one[1][0] == two[1][0]
    assert one[0][1] > two[0][1] > one[1][1], "an SVG counts from the top"
    dots = re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)"', page)
    assert [tuple(map(float, dot)) for dot in dots] == [one[-1], two[-1]]


def test_more_runs_than_colours_share_them_and_what_is_no_number_is_left_out() -> None:
    runs = [run(f"r{at}", train={"loss": [(1.0, 1.0), (2.0, float("nan"))]}) for at in range(8)]
    page = render_comparison(runs)
    colours = re.findall(r'<li><span style="color:([^"]+)">', page)
    assert len(colours) == 8 and len(set(colours)) == 6 and colours[6:] == colours[:2]
    paths = re.findall(r'<path class="line" style="[^"]*" d="M([^"]*)"', page)
    assert len(paths) == 8 and {path.split(",")[0] for path in paths} == {f"{44 + (300 - 44 - 10) / 2:.1f}"}
