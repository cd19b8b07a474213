"""The report's drawings as inline SVG: curves and the plan graph, and which curves of a step are drawn."""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from nemotron_steps.runs.log_format import number
from nemotron_steps.runs.report.data import StepReport

WIDTH, HEIGHT = 300, 132
_LEFT, _RIGHT, _TOP, _BOTTOM = 44, 10, 10, 20
_SMOOTH_FROM = 24
"""Curves of at least this many points get a moving average drawn over them."""

_TICK = ".12g"
"""Digits of a tick."""
_FINEST = 1e-11
"""How far ticks are apart at least, as a share of the largest value: nearer ones would be the same in those digits."""

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


@dataclass(frozen=True)
class Arranged:
    """The curves of a step by where they stand on the page."""

    shown: Mapping[str, Points]
    environments: Environments
    folded: Mapping[str, Points]
    once: Mapping[str, Points]
    """What was measured a single time."""


def arranged(step: StepReport) -> Arranged:
    """The curves of a step; environments only in a run of several."""
    environments: Environments = {}
    apart = set()
    for name in sorted(step.curves):
        for kind, pattern in _OF_ENVIRONMENTS.items():
            if match := pattern.fullmatch(name):
                environments.setdefault(match[1], {})[kind] = step.curves[name]
                apart.add(name)
    if len(environments) < 2:
        environments, apart = {}, set()
    rest = {name: step.curves[name] for name in sorted(step.curves.keys() - apart)}
    several = {name: points for name, points in rest.items() if len(points) > 1}
    shown = {name: several[name] for name in headlines(list(several))}
    return Arranged(
        shown,
        dict(sorted(environments.items())),
        {name: points for name, points in several.items() if name not in shown},
        {name: points for name, points in rest.items() if name not in several},
    )


def by_kind(environments: Environments) -> dict[str, dict[str, Points]]:
    """What is measured → environment → its curve."""
    kinds = {kind: {name: of[kind] for name, of in environments.items() if kind in of} for kind in _OF_ENVIRONMENTS}
    return {kind: curves for kind, curves in kinds.items() if curves}


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


def curve(points: Points, label: str, within: Points = ()) -> Markup:
    """A line over training steps. Points with a value that is not finite are left out."""
    kept = [(x, y) for x, y in points if math.isfinite(y)]
    if not kept:
        return Markup('<svg class="curve"></svg>')
    place, parts = axes([*kept, *((x, y) for x, y in within if math.isfinite(y))])
    smooth = len(kept) >= _SMOOTH_FROM
    parts.append(f'<path class="{"raw" if smooth else "line"}" d="{_path([place(x, y) for x, y in kept])}"/>')
    if smooth:
        parts.append(f'<path class="line" d="{_path([place(x, y) for x, y in moving_average(kept)])}"/>')
    end_x, end_y = place(*kept[-1])
    parts.append(f'<circle class="dot" cx="{end_x:.1f}" cy="{end_y:.1f}" r="3"/>')
    data = json.dumps([[x, y, *(round(c, 1) for c in place(x, y))] for x, y in thinned(kept)], separators=(",", ":"))
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
    ticks = nice_ticks(y_low, y_high, 3)
    y_low, y_high = min(y_low, ticks[0]), max(y_high, ticks[-1])

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - x_low) / (x_high - x_low) if x_high > x_low else 0.5
        up = (y - y_low) / (y_high - y_low) if y_high > y_low else 0.5
        return _LEFT + across * (WIDTH - _LEFT - _RIGHT), HEIGHT - _BOTTOM - up * (HEIGHT - _TOP - _BOTTOM)

    parts = []
    for tick in ticks:
        _, y = place(x_low, tick)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{_LEFT - 6}" y="{y + 3:.1f}" text-anchor="end">{tick:{_TICK}}</text>')
    for x, anchor in ((x_low, "start"), (x_high, "end")) if x_high > x_low else ((x_low, "middle"),):
        px, _ = place(x, y_low)
        parts.append(f'<text class="tick" x="{px:.1f}" y="{HEIGHT - 5}" text-anchor="{anchor}">{number(x)}</text>')
    return place, parts


def moving_average(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Centred mean over about a tenth of the points, shorter at the ends so that no point is invented."""
    half = max(1, len(points) // 20)
    averaged = []
    for index, (x, _) in enumerate(points):
        reach = min(half, index, len(points) - 1 - index)
        window = [y for _, y in points[index - reach : index + reach + 1]]
        averaged.append((x, sum(window) / len(window)))
    return averaged


def thinned(points: Sequence[tuple[float, float]], limit: int = 400) -> Sequence[tuple[float, float]]:
    """At most `limit` of the points, evenly, always with the last: what a pointer can tell apart."""
    if len(points) <= limit:
        return points
    step = len(points) / (limit - 1)
    return [*(points[int(index * step)] for index in range(limit - 1)), points[-1]]


def nice_ticks(low: float, high: float, count: int) -> list[float]:
    """About `count` round values (1, 2 or 5 times a power of ten apart) from at most `low` to at least `high`."""
    span = high - low or abs(high)
    if span < 1e-300:
        span = 1.0
    raw = max(span / count, _FINEST * max(abs(low), abs(high)))
    scale = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * scale for factor in (1, 2, 5, 10) if factor * scale >= raw * 0.999)
    first = math.floor(low / step + 1e-9)
    last = max(math.ceil(high / step - 1e-9), first + 1)
    return [float(f"{index * step:{_TICK}}") for index in range(first, last + 1)]


@dataclass(frozen=True)
class Node:
    """One step of the plan graph. `state` is a CSS class: ran, cached, reused, failed, running, pending."""

    key: str
    note: str
    state: str
    parents: tuple[tuple[str, str], ...]
    """(parent key or "", label): where each input comes from; "" is something supplied from outside."""


_BOX_HEIGHT, _GAP, _WIDTH, _MARGIN = 54, 20, 320, 56


def plan_graph(nodes: Sequence[Node]) -> Markup:
    """Steps below each other, each below those it reads from, edges on their left."""
    row = {node.key: index for index, node in enumerate(nodes)}
    top = {key: 4.0 + index * (_BOX_HEIGHT + _GAP) for key, index in row.items()}
    height, width = 8 + len(nodes) * (_BOX_HEIGHT + _GAP) - _GAP, _WIDTH - _MARGIN - 4
    parts = []
    for node in nodes:
        for parent, label in node.parents:
            if parent in row:
                start, end = top[parent] + _BOX_HEIGHT / 2, top[node.key] + _BOX_HEIGHT / 2
                # The farther an edge goes, the farther out it runs, so that edges lie beside each other.
                out = max(4.0, _MARGIN - 12 - 10 * abs(row[node.key] - row[parent]))
                path = f"M{_MARGIN},{start} C{out},{start} {out},{end} {_MARGIN - 5},{end}"
                parts.append(
                    f'<path class="edge" marker-end="url(#arrow)" d="{path}"><title>{escape(label)}</title></path>'
                )
    for node in nodes:
        x, y, letters = _MARGIN, top[node.key], int((width - 36) / 7.4)
        parts.append(
            f'<g class="node {escape(node.state)}"><title>{escape(node.key)}</title>'
            f'<rect x="{x}" y="{y}" width="{width}" height="{_BOX_HEIGHT}" rx="8"/>'
            f'<circle cx="{x + 16}" cy="{y + 20}" r="4.5"/>'
            f'<text class="name" x="{x + 28}" y="{y + 24}">{escape(_shortened(node.key, letters))}</text>'
            f'<text class="note" x="{x + 28}" y="{y + 42}">{escape(_shortened(node.note, letters + 3))}</text></g>'
        )
    return Markup(
        f'<svg class="plan" width="{_WIDTH}" height="{height}" viewBox="0 0 {_WIDTH} {height}" role="img" '
        f'aria-label="plan graph"><defs><marker id="arrow" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="7" '
        f'markerHeight="7" orient="auto"><path d="M0,0 L8,4 L0,8 z"/></marker></defs>{"".join(parts)}</svg>'
    )


def shares(values: Mapping[str, float]) -> list[tuple[str, float, float, float]]:
    """(name, value, share of the sum, share of the longest), longest first, without what took no time."""
    values = {name: value for name, value in values.items() if value > 0} or values
    total, longest = sum(values.values()) or 1.0, max(values.values(), default=1.0) or 1.0
    ordered = sorted(values.items(), key=lambda item: -item[1])
    return [(name, value, value / total, value / longest) for name, value in ordered]


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f},{y:.1f}" for x, y in points)


def _shortened(text: str, length: int) -> str:
    return text if len(text) <= length else "…" + text[-(length - 1) :]
