"""The pages about runs, self-contained and opened from disk without a network: of one run, of several side by
side, and of a home. The templates of `assets` escape every value: samples are model output."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

from markupsafe import Markup, escape

from nemotron_steps.artifacts.files import as_float, write_atomic
from nemotron_steps.artifacts.integrity import place_of
from nemotron_steps.artifacts.models import short_digest
from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.errors import ArtifactError
from nemotron_steps.runs import log_format
from nemotron_steps.runs.log_format import number
from nemotron_steps.runs.report.comparison import compare, steps_of
from nemotron_steps.runs.report.data import RunReport, StepReport, read_report
from nemotron_steps.runs.report.seed_stats import MEANING, Outcome, as_text, spread_tables
from nemotron_steps.runs.run_folder import called, list_runs

if TYPE_CHECKING:
    from jinja2 import Environment


_SHOWN_SAMPLES = 2
"""Of each kind: the latest ones."""
_APART = ("prompt", "response", "text", "which", "judge")
"""What of a sample does not stand in its line of facts."""
_COLORS = ("#3f7d00", "#b3261e", "#1f6fb2", "#9a6200", "#7b3fb3", "#0b7a75", "#d6409f", "#5b6470", "#6b3e26", "#b5a000")
"""Of the runs of a comparison."""


def write_report(folder: Path, store: ArtifactStore) -> Path:
    """Write report.html into a run folder from what the folder holds; returns its path."""
    path = folder / "report.html"
    write_atomic(path, render_page(read_report(folder, store)).encode())
    return path


def write_comparison(folders: Sequence[Path], store: ArtifactStore) -> tuple[Path, dict[str, Any]]:
    """Write comparison.html into the folder of the first run; returns its path and what differs, as `compare` does."""
    path, runs = folders[0] / "comparison.html", [read_report(folder, store) for folder in folders]
    found, steps = compare(runs, store), [steps_of(run) for run in runs]
    more = [f"hsl({137 * n % 360} 90% 60%)" for n in range(len(runs) - len(_COLORS))]
    named = zip(runs, found["runs"], [*_COLORS, *more], strict=False)
    shared = {}
    for key in dict.fromkeys(key for each in steps for key in each):
        curves = [each[key].curves if key in each else {} for each in steps]
        if sum(bool(each) for each in curves) > 1:
            names = headlines(sorted({name for each in curves for name in each}))
            shared[key] = {name: [each.get(name) for each in curves] for name in names}
    legend = [(run, each["name"], color) for run, each, color in named]
    write_atomic(path, render("comparison.html", legend=legend, found=found, shared=shared).encode())
    return path, found


def write_index(store: ArtifactStore, path: Path) -> None:
    """Write the page of every run and artifact of a home."""
    runs, artifacts, folder = list_runs(store), [], path.absolute().parent

    def link(target: Path, text: str) -> str:
        # "./" keeps a first part with a colon from being read as a scheme.
        there = "./" + quote(Path(os.path.relpath(target.absolute(), folder)).as_posix())
        return Markup('<a href="{}">{}</a>').format(there, text) if target.exists() else text

    for artifact in sorted(store.list_artifacts(), key=lambda artifact: -artifact.created):
        artifacts.append((artifact, artifact.ref))
        with suppress(ArtifactError):  # a folder that may be anybody's is no link
            artifacts[-1] = (artifact, link(place_of(store, artifact), artifact.ref))
    page = render(
        "index.html",
        title=store.backend.url,
        now=time.time(),
        runs=[(run, called(run, runs)) for run in runs[::-1]],
        artifacts=artifacts,
        report_of=lambda run, text: link(store.backend.scratch / "runs" / run / "report.html", text),
    )
    write_atomic(path, page.encode())


def render_page(run: RunReport) -> str:
    """The whole page about a run."""
    outcomes = []
    for step in run.steps:
        instance = step.plan.get("instance") or {}
        outcomes.append(Outcome(step.key, step.summary, instance.get("stage", ""), instance.get("labels")))
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
        spreads={title: as_text(table) for title, table in spread_tables(outcomes).items()},
        spread_meaning=MEANING,
        spent={step.key: step.seconds for step in run.steps if step.state == "ran" and step.seconds},
        arranged=arranged,
        chosen_samples=_chosen_samples,
        shown_apart=_APART,
        command=command_of(run.request),
    )


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
        "as_json": lambda value: json.dumps(value, ensure_ascii=False),
        "date": lambda when: time.strftime("%Y-%m-%d %H:%M", time.localtime(when)),
        "metric": log_format.metric_text,
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
        shares=shares,
        columns_of=log_format.columns_of,
        compared=log_format.compared,
        curve=curve,
        overlay=overlay,
        command_of=command_of,
    )
    return found


def _source(name: str) -> str:
    """A template without its own line breaks and indentation, which would be spaces on the page."""
    return re.sub(r"\n\s*(?=[<{])|(?<=[>}])\n\s*", "", _asset(name))


def _asset(name: str) -> str:
    return (files("nemotron_steps.runs.report") / "assets" / name).read_text(encoding="utf-8")


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


WIDTH, HEIGHT = 300, 132
_RIGHT, _TOP, _BOTTOM, _DIGIT = 10, 10, 20, 6.5
"""Margins, and the width of a digit in the labels; the left margin is as wide as they are."""
_SMOOTH_FROM = 24
"""Curves of at least this many points get a moving average drawn over them."""
_POINTED_AT = 400
"""Points of a curve, the last among them, that a pointer can show."""

Points = Sequence[tuple[float, float]]
"""(training step, value), in order."""
Environments = dict[str, dict[str, Points]]
"""Environment → what is measured of it → its curve."""

_FIRST = (
    *("reward", "kl", "loss", "entropy", "length", "policy_lag", "token_mult_prob_error"),
    *("validation", "accuracy", "agreement", "grad_norm", "truncat", "lr"),
)
"""One metric for each of these words is shown, in this order; the others are folded away."""
_SHOWN_CURVES = 12
_OF_ENVIRONMENTS = {
    "reward": re.compile(r"reward/([^/]+)/mean"),
    "length": re.compile(r"response_length/([^/]+)/mean"),
    "failures": re.compile(r"failure_rate/([^/]+)"),
}
"""What is recorded of each environment of a run of several, and the name of its curve."""


class Arranged(NamedTuple):
    """The curves of a step by where they stand on the page."""

    shown: Mapping[str, Points]
    environments: Environments
    folded: Mapping[str, Points]
    once: Mapping[str, Points]


def arranged(step: StepReport) -> Arranged:
    """The curves of a step: those shown, of each environment (in a run of several), folded away, measured once."""
    environments: Environments = {}
    for name in sorted(step.curves):
        for kind, pattern in _OF_ENVIRONMENTS.items():
            if match := pattern.fullmatch(name):
                environments.setdefault(match[1], {})[kind] = step.curves[name]
    rest = {name: step.curves[name] for name in sorted(step.curves)}
    several = {name: points for name, points in rest.items() if len(points) > 1}
    shown = {name: several[name] for name in headlines(list(several))}
    return Arranged(
        shown,
        dict(sorted(environments.items())) if len(environments) > 1 else {},
        {name: points for name, points in several.items() if name not in shown},
        {name: points for name, points in rest.items() if name not in several},
    )


def headlines(names: Sequence[str]) -> list[str]:
    """The metrics worth seeing first: of those that hold a word the mean, or else the one with the shortest name."""
    chosen: list[str] = []
    for word in _FIRST:
        matching = [name for name in names if word in re.split(r"[/_]", name) or (len(word) > 2 and word in name)]
        left = [name for name in matching if name not in chosen]
        if left:
            chosen.append(min(left, key=lambda name: (not name.endswith("mean"), name.count("/"), len(name), name)))
    rest = [name for name in names if name not in chosen]
    return [*chosen, *rest][:_SHOWN_CURVES] if len(names) <= _SHOWN_CURVES else chosen[:_SHOWN_CURVES]


def curve(points: Points, label: str) -> Markup:
    """A line over training steps. Points with a value that is not finite are left out."""
    kept = [(x, y) for x, y in points if math.isfinite(y)]
    if not kept:
        return Markup('<svg class="curve"></svg>')
    place, parts = axes(kept)
    smooth = len(kept) >= _SMOOTH_FROM
    parts.append(f'<path class="{"raw" if smooth else "line"}" d="{_path([place(x, y) for x, y in kept])}"/>')
    if smooth:
        # A centred mean over about a tenth of the points, shorter at the ends so that no point is invented.
        half, averaged = max(1, len(kept) // 20), []
        for index, (x, _) in enumerate(kept):
            reach = min(half, index, len(kept) - 1 - index)
            window = [y for _, y in kept[index - reach : index + reach + 1]]
            averaged.append(place(x, sum(window) / len(window)))
        parts.append(f'<path class="line" d="{_path(averaged)}"/>')
    end_x, end_y = place(*kept[-1])
    parts.append(f'<circle class="dot" cx="{end_x:.1f}" cy="{end_y:.1f}" r="3"/>')
    pointed_at = kept[:: -1 - len(kept) // _POINTED_AT][::-1]
    data = json.dumps([[x, y, *(round(c, 1) for c in place(x, y))] for x, y in pointed_at], separators=(",", ":"))
    parts.append(
        f'<g class="hover" visibility="hidden"><line y1="{_TOP}" y2="{HEIGHT - _BOTTOM}"/><circle r="3.5"/></g>'
    )
    return _drawing(label, parts, f' data-points="{escape(data)}"')


def overlay(name: str, series: Sequence[Points | None], colors: Sequence[str]) -> Markup:
    """A figure of the curves of several runs, each in its colour; empty where none has a number."""
    finite = [[(x, y) for x, y in each or () if math.isfinite(y)] for each in series]
    every = [point for each in finite for point in each]
    if not every:
        return Markup()
    place, parts = axes(every)
    for each, color in zip(finite, colors, strict=True):
        if each:
            x, y = place(*each[-1])
            path = _path([place(*point) for point in each])
            parts.append(f'<path class="line" style="stroke:{color}" d="{path}"/>')
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" style="fill:{color}"/>')
    caption = Markup("<figcaption><span>{}</span></figcaption>").format(name)
    return Markup("<figure>{}{}</figure>").format(caption, _drawing(name, parts))


def _drawing(label: str, parts: Sequence[str], data: str = "") -> Markup:
    start = f'<svg class="curve" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}"{data}>'
    return Markup(f"{start}{''.join(parts)}</svg>")


def axes(covered: Points) -> tuple[Callable[[float, float], tuple[float, float]], list[str]]:
    """Where a point lies in a drawing that reaches over all of `covered` (finite, at least one), and its grid."""
    x_low, x_high = min(x for x, _ in covered), max(x for x, _ in covered)
    y_low, y_high = min(y for _, y in covered), max(y for _, y in covered)
    ticks = list(dict.fromkeys((y_low, y_low / 2 + y_high / 2, y_high)))
    texts = [number(tick) for tick in ticks]
    for digits in range(5, 18):  # close together: as many as tell them apart
        if len(set(texts)) < len(ticks):
            texts = [f"{tick:.{digits}g}" for tick in ticks]
    left = 14 + _DIGIT * max(map(len, texts))

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - x_low) / (x_high - x_low) if x_high > x_low else 0.5
        up = (y - y_low) / (y_high - y_low) if y_high > y_low else 0.5
        return left + across * (WIDTH - left - _RIGHT), HEIGHT - _BOTTOM - up * (HEIGHT - _TOP - _BOTTOM)

    parts = []
    for tick, text in zip(ticks, texts, strict=True):
        _, y = place(x_low, tick)
        parts.append(f'<line class="grid" x1="{left:.1f}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{left - 6:.1f}" y="{y + 3:.1f}" text-anchor="end">{text}</text>')
    for x, anchor in ((x_low, "start"), (x_high, "end")) if x_high > x_low else ((x_low, "middle"),):
        px, _ = place(x, y_low)
        parts.append(f'<text class="tick" x="{px:.1f}" y="{HEIGHT - 5}" text-anchor="{anchor}">{number(x)}</text>')
    return place, parts


def shares(values: Mapping[str, float]) -> list[tuple[str, float, float, float]]:
    """(name, value, share of the sum, share of the longest), longest first, without what took no time."""
    values = {name: value for name, value in values.items() if value > 0} or values
    total, longest = sum(values.values()) or 1.0, max(values.values(), default=1.0) or 1.0
    ordered = sorted(values.items(), key=lambda item: -item[1])
    return [(name, value, value / total, value / longest) for name, value in ordered]


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f},{y:.1f}" for x, y in points)
