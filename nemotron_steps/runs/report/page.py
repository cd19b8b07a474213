"""The pages about runs, self-contained and opened from disk without a network: of one run, of several side by side, and
of a home. The templates of `assets` escape every value: samples are model output."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from nemotron_steps.artifacts.files import as_float, write_atomic
from nemotron_steps.artifacts.models import short_digest
from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.runs import log_format
from nemotron_steps.runs.report import svg
from nemotron_steps.runs.report.data import RunReport, StepReport, read_report
from nemotron_steps.runs.report.seed_stats import MEANING, Outcome, as_text, spread_tables

if TYPE_CHECKING:
    from jinja2 import Environment


_SHOWN_SAMPLES = 2
"""Of each kind: the latest ones."""
_APART = ("prompt", "response", "text", "which", "judge")
"""What of a sample does not stand in its line of facts."""
_COLORS = ("#3f7d00", "#b3261e", "#1f6fb2", "#9a6200", "#7b3fb3", "#0b7a75")
"""Of the runs of a comparison."""


def write_report(folder: Path, store: ArtifactStore) -> Path:
    """Write report.html into a run folder from what the folder holds; returns its path."""
    path = folder / "report.html"
    write_atomic(path, render_page(read_report(folder, store)).encode())
    return path


def write_comparison(folders: Sequence[Path], store: ArtifactStore) -> Path:
    """Write comparison.html into the folder of the first run; returns its path."""
    path = folders[0] / "comparison.html"
    write_atomic(path, render_comparison([read_report(folder, store) for folder in folders]).encode())
    return path


def render_page(run: RunReport) -> str:
    """The whole page about a run."""
    ran = sum(step.state == "ran" for step in run.steps)
    cached = sum(step.state in ("cached", "reused") for step in run.steps)
    return render(
        "report.html",
        run=run,
        goals_first=sorted(run.steps, key=lambda step: step.key not in run.goals),
        failed=next((step for step in run.steps if step.error is not None), None),
        facts_of_run=[
            time.strftime("%Y-%m-%d %H:%M", time.localtime(run.created)),
            log_format.seconds(run.seconds),
            f"{ran} ran, {cached} cached" if cached else f"{ran} step{'' if ran == 1 else 's'} ran",
            *([f"attempt {run.attempts}"] if run.attempts > 1 else []),
        ],
        spreads={title: as_text(table) for title, table in spread_tables(map(_outcome, run.steps)).items()},
        spread_meaning=MEANING,
        plan=_plan(run),
        spent={step.key: step.seconds for step in run.steps if step.state == "ran" and step.seconds},
        arranged=svg.arranged,
        by_kind=svg.by_kind,
        chosen_samples=_chosen_samples,
        shown_apart=_APART,
        command=command_of(run.request),
    )


def render_comparison(runs: Sequence[RunReport]) -> str:
    """The whole page: a legend, then for each step that several runs have its curves and last values."""
    colors = [_COLORS[index % len(_COLORS)] for index in range(len(runs))]
    shared = []
    for key in dict.fromkeys(step.key for run in runs for step in run.steps):
        curves = [next((step.curves for step in run.steps if step.key == key), {}) for run in runs]
        if sum(bool(each) for each in curves) > 1:
            shared.append((key, svg.headlines(sorted({name for each in curves for name in each})), curves))

    def overlay(name: str, curves: Sequence[Mapping[str, svg.Points]]) -> Markup:
        return svg.overlay(name, [each.get(name, []) for each in curves], colors)

    return render("comparison.html", colored=list(zip(runs, colors, strict=True)), shared=shared, overlay=overlay)


def render(template: str, **values: Any) -> str:
    """A page from a template of report_assets."""
    return _templates().get_template(template).render(values) + "\n"


@cache
def _templates() -> Environment:
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    found = Environment(loader=FunctionLoader(_source), autoescape=True, undefined=StrictUndefined)
    found.tests.update(change=log_format.is_change, table=log_format.is_table)
    filters: dict[str, Callable[..., Any]] = {
        "as_float": as_float,
        "metric": log_format.metric_text,
        "date": lambda when: time.strftime("%Y-%m-%d %H:%M", time.localtime(when)),
        "number": log_format.number,
        "seconds": log_format.seconds,
        "short_digest": short_digest,
        "shown": log_format.values_of,
        "size": log_format.readable_size,
        "text": lambda value: value if isinstance(value, str) else "\n".join(map(str, value or [value])),
        "words": lambda name: str(name).replace("_", " "),
    }
    found.filters.update(filters)
    found.globals.update(
        asset=lambda name: Markup(_asset(name)),
        shares=svg.shares,
        columns_of=log_format.columns_of,
        compared=log_format.compared,
        curve=svg.curve,
    )
    return found


def _source(name: str) -> str:
    """A template without its own line breaks and indentation, which would be spaces on the page."""
    return re.sub(r"\n\s*(?=[<{])|(?<=[>}])\n\s*", "", _asset(name))


def _asset(name: str) -> str:
    return (files("nemotron_steps.runs.report") / "assets" / name).read_text(encoding="utf-8")


def _outcome(step: StepReport) -> Outcome:
    instance = step.plan.get("instance") or {}
    return Outcome(step.key, step.summary, instance.get("stage", ""), instance.get("labels"))


def _plan(run: RunReport) -> Markup:
    """The graph of the plan."""
    nodes = []
    for step in run.steps:
        parents = tuple(
            (str(source.get("step", "")), f"{port} ← {source.get('step') or source.get('ref')}")
            for port, source in step.plan.get("inputs", {}).items()
        )
        took = step.seconds is not None and step.state != "pending"
        notes = [step.state, log_format.seconds(step.seconds or 0.0) if took else ""]
        notes.append("inserted" if step.plan.get("inserted") else "")
        nodes.append(svg.Node(step.key, " · ".join(filter(None, notes)), step.state, parents))
    return svg.plan_graph(nodes) if nodes else Markup()


def _chosen_samples(samples: Sequence[Mapping[str, Any]]) -> list[tuple[str, Sequence[Mapping[str, Any]]]]:
    """Best and worst by reward of the whole run, the latest, and the first ones to compare them with."""
    if len(samples) <= 2 * _SHOWN_SAMPLES:
        return [("", samples)]
    graded = [each for each in samples if isinstance(each.get("reward"), int | float)]
    ranked = sorted(graded, key=lambda each: -each["reward"])
    kinds = [("best", ranked[:_SHOWN_SAMPLES]), ("worst", ranked[::-1][:_SHOWN_SAMPLES])] if ranked else []
    latest, first = samples[::-1][:_SHOWN_SAMPLES], samples[:_SHOWN_SAMPLES]
    return [*kinds, ("latest", latest), ("first", first)]


def command_of(request: Mapping[str, Any]) -> str:
    """What stands after `steps run` to ask for the same; empty where no steps were asked for."""
    targets = request.get("targets")
    if not targets or not isinstance(targets, list):
        return ""
    words = [*targets, *(["-c", request["config"]] if request.get("config") else [])]
    words += [part for port, ref in (request.get("inputs") or {}).items() for part in ("--input", f"{port}={ref}")]
    words += [part for text in request.get("over") or [] for part in ("--over", text)]
    return shlex.join(map(str, [*words, *(request.get("overrides") or [])]))
