"""comparison.html: the curves of several runs over each other, and what each came to. One self-contained page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path

from nemotron_steps.artifacts.files import write_atomic
from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.runs.report_data import RunReport, read_report
from nemotron_steps.runs.report_metrics import at_step, headlines
from nemotron_steps.runs.report_svg import HEIGHT, WIDTH, Points, axes

_COLORS = ("#3f7d00", "#b3261e", "#1f6fb2", "#9a6200", "#7b3fb3", "#0b7a75")


def write_comparison(folders: Sequence[Path], store: ArtifactStore) -> Path:
    """Write comparison.html into the folder of the first run; returns its path."""
    path = folders[0] / "comparison.html"
    write_atomic(path, render_comparison([read_report(folder, store) for folder in folders]).encode())
    return path


def render_comparison(runs: Sequence[RunReport]) -> str:
    """The whole page: a legend, then for each step that several runs have its curves and last values."""
    legend = "".join(
        f'<li><span style="color:{color}">■</span> {escape(run.name or run.id)} <code>{escape(run.id)}</code> '
        f'<span class="state {escape(run.status)}">{escape(run.status)}</span></li>'
        for run, color in zip(runs, _colors(runs), strict=True)
    )
    keys = list(dict.fromkeys(step.key for run in runs for step in run.steps))
    body = "".join(_step(key, runs) for key in keys) or "<section><p>no step is in two of the runs</p></section>"
    style = (files("nemotron_steps.runs") / "report_assets" / "report.css").read_text(encoding="utf-8")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Comparison of runs</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{style}</style></head><body>'
        f"<header><div><h1>Comparison of runs</h1><ul>{legend}</ul></div></header><main>{body}</main></body></html>\n"
    )


def _step(key: str, runs: Sequence[RunReport]) -> str:
    """One step of all runs; nothing where fewer than two have curves of it."""
    curves = [next((step.curves for step in run.steps if step.key == key), {}) for run in runs]
    if sum(bool(each) for each in curves) < 2:
        return ""
    names = headlines(sorted({name for each in curves for name in each}))
    charts = "".join(_chart(name, [each.get(name, []) for each in curves], _colors(runs)) for name in names)
    head = "".join(f"<th>{escape(run.id)}</th>" for run in runs)
    rows = "".join(
        f"<tr><td>{escape(name)}</td>"
        + "".join(f'<td class="value">{at_step(each[name]) if each.get(name) else ""}</td>' for each in curves)
        + "</tr>"
        for name in names
    )
    return (
        f'<section><h2>{escape(key)}</h2><div class="grid-of-charts">{charts}</div><h4>last values</h4>'
        f'<div class="scroll"><table><thead><tr><th>metric</th>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
        "</section>"
    )


def _chart(name: str, series: Sequence[Points], colors: Sequence[str]) -> str:
    points = [[(x, y) for x, y in each if math.isfinite(y)] for each in series]
    every = [point for each in points for point in each]
    if not every:
        return ""
    place, parts = axes(every)
    for each, color in zip(points, colors, strict=True):
        if each:
            path = "L".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in each))
            x, y = place(*each[-1])
            parts.append(f'<path class="line" style="stroke:{color}" d="M{path}"/>')
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" style="fill:{color}"/>')
    return (
        f"<figure><figcaption><span>{escape(name)}</span></figcaption>"
        f'<svg class="curve" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(name, quote=True)}">'
        f"{''.join(parts)}</svg></figure>"
    )


def _colors(runs: Sequence[RunReport]) -> list[str]:
    return [_COLORS[index % len(_COLORS)] for index in range(len(runs))]
