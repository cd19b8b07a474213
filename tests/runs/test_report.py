from __future__ import annotations

import json
import math
import re
import shlex
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.errors import DataError, NonFiniteLossError
from nemotron_steps.runs.recorder import row_at
from nemotron_steps.runs.report.data import read_report
from nemotron_steps.runs.report.page import write_report
from nemotron_steps.runs.report.svg import (
    curve,
    headlines,
    nice_ticks,
)
from tests.runs.runner_toy_plan import run

VOID = {"meta", "input", "circle", "line", "rect", "path", "br"}


class Page(HTMLParser):
    """The page's text, and a check that every element is closed."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""
        self.attributes: list[tuple[str, str, str]] = []
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attributes]
        if tag not in VOID or (tag == "path" and "edge" in dict(attributes).values()):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attributes]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data + " "


def page_of(folder: Path) -> Page:
    return Page((folder / "report.html").read_text())


def test_report_shows_results_curves_samples_lineage_and_config(store: ArtifactStore) -> None:
    request = {"targets": ["toy/train"], "config": "tiny", "overrides": ["steps=10"], "inputs": {}}
    result = run(store, request=request, train={"fail": "signal"})
    page = page_of(result.folder)
    text = " ".join(page.text.split())
    assert "toy done" in text and result.id in text
    assert re.search(r"sum 0 285 \+285", text)
    assert "kl_spike (kl=0.9123, step=6, 2 times)" in text and "raise the penalty" in text
    assert "toy/train/model:v1" in text and "rows ← toy/make/rows:v1" in text
    assert "steps run toy/train -c tiny steps=10" in text
    curves = [value for tag, name, value in page.attributes if tag == "svg" and name == "data-points"]
    assert sorted(json.loads(points)[-1][:2] for points in curves) == [[10, 0.1], [10, 285]]


def test_the_command_of_a_report_asks_for_everything_that_was_asked_for(store: ArtifactStore) -> None:
    request = {
        "targets": ["sft", "rl"],
        "config": "tiny",
        "overrides": ["a=two words", "~b"],
        "inputs": {"policy": "m:v1", "rl.prompts": "p"},
        "over": ["sft.seed=1,2", "rl.lr=3,4"],
    }
    page = (run(store, request=request).folder / "report.html").read_text()
    (command,) = re.findall(r"<pre>steps run (.*?)</pre>", page)
    assert shlex.split(unescape(command)) == [
        *("sft", "rl", "-c", "tiny", "--input", "policy=m:v1", "--input", "rl.prompts=p"),
        *("--over", "sft.seed=1,2", "--over", "rl.lr=3,4", "a=two words", "~b"),
    ]


def test_signals_advice_and_errors_are_those_of_the_last_attempt(store: ArtifactStore) -> None:
    result = run(store, train={"fail": "signal"})
    (step,) = [each for each in read_report(result.folder, store).steps if each.signals]
    assert step.hints
    started = {"kind": "run_started", "time": 0.0, "step": ""}
    failed = {
        "kind": "step_failed",
        "time": 0.0,
        "step": step.key,
        "error": {"code": "E1"},
        "row": "r",
        "traceback": "t",
    }
    with (result.folder / "events.jsonl").open("a") as file:
        file.write(json.dumps(failed) + "\n")
    (broken,) = [each for each in read_report(result.folder, store).steps if each.key == step.key]
    assert (broken.error, broken.row, broken.traceback) == ({"code": "E1"}, "r", "t")
    with (result.folder / "events.jsonl").open("a") as file:
        file.write(json.dumps(started) + "\n")
    (resumed,) = [each for each in read_report(result.folder, store).steps if each.key == step.key]
    assert (resumed.signals, resumed.hints, resumed.error, resumed.row, resumed.traceback) == ({}, [], None, "", "")


def test_report_needs_no_network_and_escapes_model_output(store: ArtifactStore) -> None:
    result = run(store)
    html = (result.folder / "report.html").read_text()
    assert "&lt;b&gt;4&lt;/b&gt;" in html and "<b>4</b>" not in html
    fetched = [(tag, name) for tag, name, _ in page_of(result.folder).attributes if name in ("src", "href")]
    assert set(fetched) == {("a", "href")}
    assert "@import" not in html and "url(http" not in html and "<script src" not in html


def test_report_of_a_failed_run_has_the_error_and_the_advice(store: ArtifactStore) -> None:
    with pytest.raises(NonFiniteLossError):
        run(store, train={"fail": "nan"})
    (folder,) = (store.backend.scratch / "runs").iterdir()
    text = " ".join(page_of(folder).text.split())
    assert "error[E600] the loss is NaN at step 5" in text and "lower the learning rate" in text
    run(store, train={"fail": "nan"}, resume=folder.name)
    text = " ".join(page_of(folder).text.split())
    assert "error[" not in text and "attempt 2" in text


def test_the_numbers_of_rl_that_matter_come_first() -> None:
    rlhf = [
        *("actor_loss", "advantages/mean", "approx_entropy", "clip_fraction", "entropy", "gen_kl_error", "grad_norm"),
        *("groups/count", "kl_penalty", "loss", "lr", "num_valid_tokens", "policy_kl_error", "probs_ratio"),
        *("response_length/max", "response_length/mean", "reward/genrm_compare/judge_score_mean"),
        *("reward/genrm_compare/mean", "reward/max", "reward/mean", "reward/min", "reward/std", "truncation_rate"),
    ]
    first = headlines(rlhf)
    assert first[:5] == ["reward/mean", "kl_penalty", "loss", "entropy", "response_length/mean"]
    assert first[5:] == ["grad_norm", "truncation_rate", "lr"]
    # A step with few metrics shows them all.
    assert sorted(headlines(["nll", "loss", "entropy", "lr"])) == ["entropy", "loss", "lr", "nll"]


def test_report_of_a_failed_run_has_the_row_and_the_traceback(store: ArtifactStore, tmp_path: Path) -> None:
    rows = tmp_path / "mine.jsonl"
    rows.write_text('{"text": "good"}\n{"text": "<bad>", "mark": "x"}\n')
    with pytest.raises(DataError):
        run(store, train={"fail": f"row {rows}:2"})
    (folder,) = (store.backend.scratch / "runs").iterdir()
    text = page_of(folder).text
    assert '{"text": "<bad>", "mark": "x"}' in text
    assert "Traceback (most recent call last)" in text and "runner_toy_steps.py" in text
    # The next attempt fails for another reason, and shows nothing of this one.
    with pytest.raises(NonFiniteLossError):
        run(store, train={"fail": "nan"}, resume=folder.name)
    assert "<bad>" not in page_of(folder).text


@pytest.mark.parametrize("said", ["{}:2", "{}:2 field mark", "environment `brittle`, row {}:2"])
def test_an_error_names_its_row_alone_or_with_its_field_or_its_environment(said: str, tmp_path: Path) -> None:
    (tmp_path / "my rows.jsonl").write_text('{"n": 1}\n{"n": 2}\n{"n": 3}\n')
    assert row_at(said.format(tmp_path / "my rows.jsonl")) == '{"n": 2}'


def test_report_can_be_written_again_when_artifacts_are_gone(store: ArtifactStore) -> None:
    import shutil

    result = run(store)
    shutil.rmtree(store.backend.scratch / "artifacts")
    write_report(result.folder, store)
    assert "gone" in page_of(result.folder).text


@given(st.floats(-1e12, 1e12), st.floats(0, 1e12), st.integers(1, 6))
@example(1904079.505327168, 3.4e-10, 5)  # nearer to each other than the digits of a tick tell apart
def test_ticks_are_round_and_cover_the_range(low: float, span: float, count: int) -> None:
    ticks = nice_ticks(low, low + span, count)
    tolerance = 1e-6 * max(abs(low), abs(low + span), 1e-9)
    assert ticks == sorted(ticks) and 2 <= len(ticks) <= count + 3
    assert len({f"{tick:.12g}" for tick in ticks}) == len(set(ticks))
    assert ticks[0] <= low + tolerance and ticks[-1] >= low + span - tolerance


@given(st.lists(st.tuples(st.floats(0, 1e5), st.floats()), max_size=60))
def test_every_curve_is_well_formed_and_inside_its_box(points: list[tuple[float, float]]) -> None:
    svg = curve([(x, y if math.isfinite(y) and abs(y) < 1e300 else math.nan) for x, y in points], 'a"<b')
    Page(svg)
    for value in re.findall(r' c[xy]="([-0-9.]+)"', svg):
        assert 0 <= float(value) <= 300
