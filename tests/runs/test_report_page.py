"""What the page says of a run, by its records alone: counts, changes and their colours, the order of steps."""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path
from typing import Any

from nemotron_steps.artifacts.models import Artifact, Edge, FileRecord
from nemotron_steps.runs.report import render_page
from nemotron_steps.runs.report_data import StepReport
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
        ("bad", "-0.25 (-50 %)"),
        ("good", "-1 (-25 %)"),
        ("bad", "+0.5 (+100 %)"),
        ("same", "+0 (+0 %)"),
        ("same", "+50 (+50 %)"),
    ]


def test_a_step_may_say_itself_which_way_is_better() -> None:
    lower, higher = {"better": "lower"}, {"better": "higher"}
    assert changes_of(
        length={"before": 100, "after": 50, **lower}, loss={"before": 0, "after": 1, **higher}
    ) == [("good", "-50 (-50 %)"), ("good", "+1")]  # fmt: skip


def test_reused_steps_count_as_cached() -> None:
    steps = [StepReport(state, {}, state=state) for state in ("ran", "cached", "reused", "pending")]
    assert " · 1 ran, 2 cached · " in page_of(*steps)
    assert " · 2 steps ran · " in page_of(steps[0], StepReport("other", {}, state="ran"))


def test_what_was_asked_for_stands_before_what_it_needed() -> None:
    needed, asked = (StepReport(key, {}, summary={"rows": 1}) for key in ("make", "train"))
    assert re.findall(r"<h3>(\w+)</h3>", page_of(needed, asked)) == ["train", "make"]


def test_the_plan_marks_inserted_steps_and_times_those_that_ran() -> None:
    states = {"make": "ran", "convert": "ran", "train": "cached"}
    steps = [
        StepReport(key, {"inserted": True} if key == "convert" else {}, state=state, seconds=10.0)
        for key, state in states.items()
    ]
    page = page_of(*steps)
    notes = dict(re.findall(r"<title>(\w+)</title>.*?<text class=\"note\"[^>]*>([^<]*)</text>", page))
    assert notes == {"make": "ran · 10 s", "convert": "ran · 10 s · inserted", "train": "cached · 10 s"}
    assert re.findall(r'bar-name">(\w+)<.*?<em>(\d+ %)', page) == [("make", "50 %"), ("convert", "50 %")]


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
