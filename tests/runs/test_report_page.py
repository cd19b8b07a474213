"""What the page says of a run, by its records alone: counts, changes and their colours, the order of steps."""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path
from typing import Any

from nemotron_steps.artifacts.models import Artifact, Edge, FileRecord
from nemotron_steps.runs.report.data import RunReport, StepReport
from nemotron_steps.runs.report.page import render_comparison, render_page
from tests.runs.report_samples import run_report


def page_of(*steps: StepReport, **changes: Any) -> str:
    return unescape(render_page(run_report(*steps, **changes)))


def changes_of(**summary: Any) -> list[tuple[str, str]]:
    """(colour, text) of each change of a summary."""
    return re.findall(r'<span class="(good|bad|same)">([^<]*)</span>', page_of(StepReport("a", {}, summary=summary)))


def test_a_change_is_green_where_it_is_for_the_better_and_says_its_share_of_what_was() -> None:
    assert changes_of(
        reward={"before": 0.5, "after": 0.75},
        accuracy={"before": 0.5, "after": 0.25},
        loss={"before": 4.0, "after": 3.0},
        kl={"before": 0.5, "after": 1.0},
        score={"before": 1.0, "after": 1.0},
        length={"before": 100, "after": 150},
    ) == [
        ("good", "+0.25 (+50 %)"),
        ("bad", "−0.25 (-50 %)"),
        ("good", "−1 (-25 %)"),
        ("bad", "+0.5 (+100 %)"),
        ("same", "no change"),
        ("same", "+50 (+50 %)"),
    ]


def test_a_step_may_say_itself_which_way_is_better() -> None:
    lower, higher = {"better": "lower"}, {"better": "higher"}
    assert changes_of(
        length={"before": 100, "after": 50, **lower}, loss={"before": 0, "after": 1, **higher}
    ) == [("good", "−50 (-50 %)"), ("good", "+1")]  # fmt: skip


def test_reused_steps_count_as_cached() -> None:
    steps = [StepReport(state, {}, state=state) for state in ("ran", "cached", "reused", "pending")]
    assert " · 1 ran, 2 cached · " in page_of(*steps)
    assert " · 2 steps ran · " in page_of(steps[0], StepReport("other", {}, state="ran"))


def test_what_was_asked_for_stands_before_what_it_needed() -> None:
    needed, asked = (StepReport(key, {}, summary={"rows": 1}) for key in ("make", "train"))
    assert re.findall(r"<h3>(\w+)</h3>", page_of(needed, asked)) == ["train", "make"]


def test_a_failure_outside_any_step_has_its_traceback() -> None:
    error = {"code": "E999", "what": "it broke", "where": "here", "expected": None, "found": "x", "hints": ["try"]}
    page = page_of(StepReport("a", {}), error=error, traceback="Traceback of the run", status="failed")
    assert "<summary>traceback</summary><pre>Traceback of the run</pre>" in page
    assert "<dt>where</dt><dd>here</dd><dt>found</dt><dd>x</dd>" in page


def test_an_artifact_has_the_size_of_all_of_its_files(tmp_path: Path) -> None:
    files = (FileRecord("a", 1_000_000, "s"), FileRecord("b", 500_000, "s"))
    artifact = Artifact(
        "toy_model", "d" * 64, tmp_path, {"rows": 3}, files, "n", 1, inputs=(Edge("rows", "e", "r:v1"),)
    )
    step = StepReport("a", {}, outputs={"model": "n:v1", "lost": "n:v2"})
    page = re.sub(r"<[^>]*>", " ", page_of(step, artifacts={"n:v1": artifact}))
    shown = " ".join(page[page.index("n:v1") :].split())
    assert shown.startswith("n:v1 a → model type toy_model")
    assert "size 1.5 MB 2 files made from rows ← r:v1 attributes rows 3 n:v2 a → lost gone" in shown


def samples_of(page: str) -> list[str]:
    """Headings and answers in the order of the page."""
    return re.findall(r"<h4>(\w*)</h4>|<pre>(a\d)</pre>", page) and [
        title or answer for title, answer in re.findall(r"<h4>(\w*)</h4>|<pre>(a\d)</pre>", page)
    ]


def test_few_samples_are_all_shown_and_of_more_those_at_the_ends() -> None:
    samples = [{"response": f"a{at}", "reward": reward} for at, reward in enumerate((0.5, "none", 1.0, 0.0, 0.75))]
    assert samples_of(page_of(StepReport("a", {}, samples=samples[:4]))) == ["", "a0", "a1", "a2", "a3"]
    assert samples_of(page_of(StepReport("a", {}, samples=samples))) == [
        *("best", "a2", "a4", "worst", "a3", "a0", "latest", "a4", "a3", "first", "a0", "a1")
    ]


def test_a_sample_shows_its_text_and_what_it_says_beside_it() -> None:
    sample = {"text": "it is so", "environment": "maths", "tags": [], "note": "", "turns": {}, "left": None, "zero": 0}
    page = page_of(StepReport("a", {}, samples=[sample]))
    assert '<div class="response"><span>response</span><pre>it is so</pre></div>' in page
    assert '<p class="note">environment <b>maths</b> · zero <b>0</b></p>' in page
    turns = page_of(StepReport("a", {}, samples=[{"prompt": ["one", "two"], "response": ""}]))
    assert "<pre>one\ntwo</pre>" in turns


def test_the_plan_says_where_inputs_are_from_and_times_only_what_ran() -> None:
    inputs = {"rows": {"step": "make"}, "policy": {"ref": "m:v1"}}
    steps = [
        StepReport("make", {}, state="cached", seconds=5.0),
        StepReport("train", {"inputs": inputs}, state="ran", seconds=10.0),
        StepReport("score", {"inputs": {"x": {"step": "train"}}}, state="ran", seconds=30.0),
        StepReport("later", {}, state="pending", seconds=3.0),
    ]
    page = page_of(*steps)
    assert "<title>rows ← make</title>" in page and "policy ← None" not in page
    assert re.findall(r'bar-name">(\w+)<.*?<em>(\d+ %)', page) == [("score", "75 %"), ("train", "25 %")]
    assert re.findall(r'class="note"[^>]*>(pending[^<]*)<', page)[0] == "pending"


def test_where_time_went_is_told_of_a_step_without_curves_and_the_last_error_has_its_steps_traceback() -> None:
    step = StepReport("a", {}, phases={"train": 1.0, "generate": 3.0}, error={"what": "x"}, traceback="of the step")
    error = {"code": "E999", "what": "it broke", "where": "here", "expected": "rows", "found": "none"}
    page = page_of(step, error=error, traceback="of the run")
    assert "where the time went" in page and "<pre>of the step</pre>" in page and "of the run" not in page
    assert "<dt>where</dt><dd>here</dd><dt>expected</dt><dd>rows</dd><dt>found</dt><dd>none</dd>" in page
    silent = StepReport("a", {}, error={"what": "x"})
    assert "<pre>of the run</pre>" in page_of(silent, error=error, traceback="of the run")


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
