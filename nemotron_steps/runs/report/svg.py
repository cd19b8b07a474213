"""The report's drawings as inline SVG: curves, and which curves of a step are drawn."""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from markupsafe import Markup, escape

from nemotron_steps.runs.log_format import number
from nemotron_steps.runs.report.data import StepReport

WIDTH, HEIGHT = 300, 132
_LEFT, _RIGHT, _TOP, _BOTTOM = 44, 10, 10, 20
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


def overlay(name: str, series: Sequence[Points], colors: Sequence[str]) -> Markup:
    """A figure of the curves of several runs, each in its colour; empty where none has a number."""
    finite = [[(x, y) for x, y in each if math.isfinite(y)] for each in series]
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

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - x_low) / (x_high - x_low) if x_high > x_low else 0.5
        up = (y - y_low) / (y_high - y_low) if y_high > y_low else 0.5
        return _LEFT + across * (WIDTH - _LEFT - _RIGHT), HEIGHT - _BOTTOM - up * (HEIGHT - _TOP - _BOTTOM)

    parts = []
    for tick in dict.fromkeys((y_low, y_low / 2 + y_high / 2, y_high)):
        _, y = place(x_low, tick)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{_LEFT - 6}" y="{y + 3:.1f}" text-anchor="end">{tick:.3g}</text>')
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
