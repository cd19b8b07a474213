import json
import re
import shlex
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest

from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.errors import DataError, NonFiniteLossError
from nemotron_steps.runs.report.page import write_comparison
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


def test_report_needs_no_network_and_escapes_model_output(store: ArtifactStore) -> None:
    result = run(store)
    html = (result.folder / "report.html").read_text()
    assert "&lt;b&gt;4&lt;/b&gt;" in html and "<b>4</b>" not in html
    fetched = [(tag, name) for tag, name, _ in page_of(result.folder).attributes if name in ("src", "href")]
    assert set(fetched) == {("a", "href")}
    assert "@import" not in html and "url(http" not in html and "<script src" not in html


def test_report_of_a_failed_run_has_its_last_attempts_error_traceback_and_advice(
    store: ArtifactStore, tmp_path: Path
) -> None:
    rows = tmp_path / "mine.jsonl"
    rows.write_text('{"text": "good"}\n{"text": "<bad>", "mark": "x"}\n')
    with pytest.raises(DataError):
        run(store, train={"fail": f"row {rows}:2"})
    (folder,) = (store.backend.scratch / "runs").iterdir()
    text = page_of(folder).text
    assert "Traceback (most recent call last)" in text and "runner_toy_steps.py" in text
    with pytest.raises(NonFiniteLossError):
        run(store, train={"fail": "nan"}, resume=folder.name)
    text = " ".join(page_of(folder).text.split())
    assert "error[E600] the loss is NaN at step 5" in text and "lower the learning rate" in text
    assert "<bad>" not in text
    run(store, train={"fail": "nan"}, resume=folder.name)
    text = " ".join(page_of(folder).text.split())
    assert "error[" not in text and "attempt 3" in text


def test_runs_are_compared_curve_by_curve_with_what_differs_and_what_makes_them_unlike(store: ArtifactStore) -> None:
    asked = [{"targets": ["toy/train"], "overrides": [f"steps={steps}"], "name": f"of {steps}"} for steps in (5, 6)]
    runs = [run(store, request=each, train={"steps": steps}) for each, steps in zip(asked, (5, 6), strict=True)]
    path, found = write_comparison([each.folder for each in runs], store)
    page = Page(path.read_text())
    assert all(page.text.count(each["name"]) > 3 for each in asked)  # in the legend and each table
    drawn = [value for tag, name, value in page.attributes if tag == "svg" and name == "aria-label"]
    lines = [value for tag, name, value in page.attributes if tag == "path" and name == "class"]
    assert sorted(drawn) == ["loss", "sum"] and lines == ["line"] * 4
    assert found["requests"] == {"steps": ["5", "6"]} and found["configs"] == {"toy/train": {"steps": [5, 6]}}
    first, second = found["results"]["toy/train"]["sum"]
    assert second["value"]["after"] - first["value"]["after"] == second["difference"] and "difference" not in first
    assert found["unlike"] == []
