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
