"""What a notebook shows of a run: the report's curves as inline SVG, its figures as a table. No library, no script."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from nemotron_steps.artifacts.files import write_atomic
from nemotron_steps.config.names import nearest
from nemotron_steps.errors import UnknownNameError
from nemotron_steps.runs.lines import in_words, number, seconds
from nemotron_steps.runs.report_svg import curve, headlines

if TYPE_CHECKING:
    from nemotron_steps.api.result import Result

# Colours that can be read on a light page and on a dark one: a notebook's theme is not known here.
_STYLE = (
    ".nemotron-steps{font:13px/1.5 system-ui,sans-serif}"
    ".nemotron-steps .charts{display:flex;flex-wrap:wrap;gap:12px;margin:8px 0}"
    ".nemotron-steps figure{margin:0;width:300px}"
    ".nemotron-steps figcaption{display:flex;justify-content:space-between}"
    ".nemotron-steps svg text{fill:currentColor;opacity:.65;font:10px system-ui,sans-serif}"
    ".nemotron-steps svg .grid{stroke:currentColor;opacity:.18}"
    ".nemotron-steps svg .line{fill:none;stroke:#5a9e1b;stroke-width:1.8}"
    ".nemotron-steps svg .raw{fill:none;stroke:#5a9e1b;opacity:.4}"
    ".nemotron-steps svg .dot{fill:#5a9e1b}"
    ".nemotron-steps td{padding:1px 14px 1px 0;text-align:left}"
)


@dataclass(frozen=True)
class Plot:
    """Curves of metrics. A notebook draws it; `save` writes it as a page.

    Attributes:
        series: name → points.
        title: whose they are.
    """

    series: Mapping[str, Mapping[int, float]]
    title: str = ""

    @property
    def html(self) -> str:
        """The curves, without what they look like; see `framed`."""
        figures = [
            f"<figure><figcaption><span>{escape(name)}</span><b>{number(list(points.values())[-1])}</b></figcaption>"
            f"{curve([(float(step), value) for step, value in points.items()], name)}</figure>"
            for name, points in self.series.items()
            if points
        ]
        return f'<div class="charts">{"".join(figures)}</div>'

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write it as a page of its own and return its path."""
        file = Path(path)
        page = f'<!doctype html><meta charset="utf-8"><title>{escape(self.title)}</title>{self._repr_html_()}\n'
        write_atomic(file, page.encode())
        return file

    def _repr_html_(self) -> str:
        return framed(self.html)


def charts(metrics: Mapping[str, Mapping[int, float]], names: Sequence[str], title: str) -> Plot:
    """The curves of the named metrics; of none named, those worth seeing first. UnknownNameError for any other."""
    for name in names:
        if name not in metrics:
            close = nearest(name, list(metrics))
            raise UnknownNameError(
                f"{title} reported no metric '{name}'",
                expected=" or ".join(close) or ", ".join(sorted(metrics)[:12]) or "a step that reports metrics",
                found=name,
                hints=tuple(f"plot({other!r})" for other in close[:2]),
            )
    return Plot({name: metrics[name] for name in names or headlines(list(metrics))}, title)


def result_html(result: Result) -> str:
    """A run in a notebook: how it went, what its last step reported, its curves."""
    took = sum(step.seconds or 0.0 for step in result.steps.values() if step.state == "ran")
    head = f"<b>{escape(result.id)}</b> · {escape(result.status)} · {seconds(took)}"
    rows = [
        *((name.replace("_", " "), escape(in_words(name, value))) for name, value in result.summary.items()),
        *((port, escape(f"{artifact.ref}  {artifact.path}")) for port, artifact in result.outputs.items()),
    ]
    table = "".join(f"<tr><td>{escape(name)}</td><td>{value}</td></tr>" for name, value in rows)
    error = result.error
    told = f"<p>error[{escape(str(error['code']))}]: {escape(str(error['what']))}</p>" if error else ""
    return framed(f"<div>{head}</div>{told}<table>{table}</table>{result.plot().html}")


def framed(content: str) -> str:
    """Content with its looks, which touch nothing else of the page."""
    return f'<div class="nemotron-steps"><style>{_STYLE}</style>{content}</div>'
