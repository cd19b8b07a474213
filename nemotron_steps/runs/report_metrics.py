"""The report's charts of one step: metrics that matter first, those of each environment, the others folded away."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape

from nemotron_steps.runs.lines import number
from nemotron_steps.runs.report_data import StepReport
from nemotron_steps.runs.report_svg import Points, bars, curve

_FIRST = (
    "reward",
    "kl",
    "loss",
    "entropy",
    "length",
    "policy_lag",
    "token_mult_prob_error",
    "validation",
    "accuracy",
    "agreement",
    "grad_norm",
    "truncat",
    "lr",
)
"""One metric for each of these words is shown, in this order; the others are folded away."""
_SHOWN_CURVES = 12
_OF_ENVIRONMENTS = {
    "reward": re.compile(r"reward/([^/]+)/mean"),
    "length": re.compile(r"response_length/([^/]+)/mean"),
    "failures": re.compile(r"failure_rate/([^/]+)"),
}
"""What is recorded of each environment of a run of several, and the name of its curve."""


def step_metrics(step: StepReport) -> str:
    """Everything that a step measured over its training steps, and where its time went."""
    environments = curves_of_environments(step)
    apart = {name for curves in environments.values() for name in curves.values()}
    names = sorted(step.curves.keys() - apart)
    several = [name for name in names if len(step.curves[name]) > 1]
    shown = headlines(several)
    folded = [name for name in several if name not in shown]
    parts = [_grid(_chart(name, step.curves[name]) for name in shown)]
    if environments:
        parts.append(_environments(step, environments))
    if folded:
        grid = _grid(_chart(name, step.curves[name]) for name in folded)
        parts.append(f"<details><summary>{len(folded)} more</summary>{grid}</details>")
    single = {name: step.curves[name] for name in names if len(step.curves[name]) == 1}
    if single:
        cells = "".join(f"<tr><td>{escape(n)}</td><td class='value'>{at_step(p)}</td></tr>" for n, p in single.items())
        parts.append(f"<details><summary>{len(single)} measured once</summary><table>{cells}</table></details>")
    if len(step.phases) > 1:
        parts.append(f"<h4>where the time went</h4>{bars(step.phases)}")
    return "".join(parts)


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


def curves_of_environments(step: StepReport) -> dict[str, dict[str, str]]:
    """Environment → what is measured of it → name of the curve; nothing in a run of fewer than two environments."""
    found: dict[str, dict[str, str]] = {}
    for name in sorted(step.curves):
        for kind, pattern in _OF_ENVIRONMENTS.items():
            match = pattern.fullmatch(name)
            if match is not None:
                found.setdefault(match[1], {})[kind] = name
    return dict(sorted(found.items())) if len(found) > 1 else {}


def _environments(step: StepReport, environments: dict[str, dict[str, str]]) -> str:
    """A table of the environments, and charts of one kind at a time on one scale: radio buttons choose without a
    script, by keyboard too."""
    group = escape(f"environments of {step.key}", quote=True)
    kinds = [kind for kind in _OF_ENVIRONMENTS if any(kind in curves for curves in environments.values())]
    choices = "".join(
        f'<label><input type="radio" name="{group}" class="{kind}"{" checked" * (kind == kinds[0])}>{kind}</label>'
        for kind in kinds
    )
    panels = "".join(f'<div class="panel {kind}">{_small_multiples(step, environments, kind)}</div>' for kind in kinds)
    return (
        f'<h4>environments</h4>{_table(step, environments)}<div class="environments">'
        f'<div class="choices" role="radiogroup" aria-label="{group}">{choices}</div>{panels}</div>'
    )


def _small_multiples(step: StepReport, environments: dict[str, dict[str, str]], kind: str) -> str:
    names = {environment: curves[kind] for environment, curves in environments.items() if kind in curves}
    every = [point for name in names.values() for point in step.curves[name]]
    return _grid(_chart(environment, step.curves[name], every) for environment, name in names.items())


def _table(step: StepReport, environments: dict[str, dict[str, str]]) -> str:
    """What each environment gave: reward in its first step and in its last, length and failures in its last."""

    def cell(curves: dict[str, str], kind: str, at: int = -1) -> str:
        return f"<td class='value'>{at_step(step.curves[curves[kind]], at) if kind in curves else ''}</td>"

    rows = "".join(
        f"<tr><td>{escape(name)}</td>{cell(curves, 'reward', 0)}{cell(curves, 'reward')}"
        f"{cell(curves, 'length')}{cell(curves, 'failures')}</tr>"
        for name, curves in environments.items()
    )
    head = "<tr><th>environment</th><th>first reward</th><th>last reward</th><th>length</th><th>failures</th></tr>"
    return f'<div class="scroll"><table>{head}{rows}</table></div>'


def at_step(points: Points, at: int = -1) -> str:
    """One value of a curve and the step it is of."""
    x, y = points[at]
    return f'{number(y)} <span class="note">step {x:.0f}</span>'


def _chart(name: str, points: Points, within: Points = ()) -> str:
    return (
        f'<figure><figcaption><span>{escape(name)}</span><b data-last="{number(points[-1][1])}">'
        f"{number(points[-1][1])}</b></figcaption>{curve(points, name, within)}</figure>"
    )


def _grid(charts: Iterable[str]) -> str:
    return f'<div class="grid-of-charts">{"".join(charts)}</div>'
