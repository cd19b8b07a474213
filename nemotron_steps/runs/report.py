"""report.html: one self-contained page about a run, opened from disk without a network.

`report_data` reads what the run recorded, `report_svg` draws, `report_metrics` arranges the charts of a step, this lays
the page out. Everything that came from a
run is escaped: samples are model output.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from nemotron_steps.artifacts.files import write_atomic
from nemotron_steps.artifacts.jsonable import as_float
from nemotron_steps.artifacts.models import Artifact, short_digest
from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.runs.lines import (
    columns_of,
    compared,
    is_change,
    is_table,
    number,
    readable_size,
    seconds,
    values_of,
)
from nemotron_steps.runs.report_data import RunReport, StepReport, read_report
from nemotron_steps.runs.report_metrics import step_metrics
from nemotron_steps.runs.report_svg import Node, bars, plan_graph
from nemotron_steps.runs.spread import MEANING, Outcome, as_text, spread_tables

_SHOWN_SAMPLES = 2
"""Of each kind: the latest ones."""
_ASIDE = ("prompt", "response", "text", "which", "judge")


def write_report(folder: Path, store: ArtifactStore) -> Path:
    """Write report.html into a run folder from what the folder holds; returns its path."""
    path = folder / "report.html"
    write_atomic(path, render_page(read_report(folder, store)).encode())
    return path


def render_page(run: RunReport) -> str:
    """The whole page."""
    sections: list[tuple[str, str, str]] = [
        ("results", "Results", _results(run)),
        ("hints", "What to do next", _hints(run)),
        ("plan", "Plan", _plan(run)),
        ("metrics", "Metrics", _metrics(run)),
        ("samples", "Samples", _samples(run)),
        ("artifacts", "Artifacts", _artifacts(run)),
        ("config", "Config", _config(run)),
    ]
    kept = [section for section in sections if section[2]]
    links = "".join(f'<a href="#{anchor}">{title}</a>' for anchor, title, _ in kept)
    body = "".join(f'<section id="{anchor}"><h2>{title}</h2>{content}</section>' for anchor, title, content in kept)
    assets = files("nemotron_steps.runs") / "report_assets"
    style, script = (assets / name for name in ("report.css", "report.js"))
    title = f"{run.name or run.id} · {run.status}"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{style.read_text(encoding='utf-8')}</style></head><body>"
        f"{_header(run)}<nav>{links}</nav><main>{_error(run)}{body}</main>"
        f"<script>{script.read_text(encoding='utf-8')}</script></body></html>\n"
    )


def _header(run: RunReport) -> str:
    ran = sum(step.state == "ran" for step in run.steps)
    cached = sum(step.state in ("cached", "reused") for step in run.steps)
    facts = [
        time.strftime("%Y-%m-%d %H:%M", time.localtime(run.created)),
        seconds(run.seconds),
        f"{ran} ran, {cached} cached" if cached else f"{ran} step{'' if ran == 1 else 's'} ran",
    ]
    if run.attempts > 1:
        facts.append(f"attempt {run.attempts}")
    return (
        f'<header><div><h1>{escape(run.name or run.id)} <span class="state {escape(run.status)}">'
        f"{escape(run.status)}</span></h1><p>{' · '.join(map(escape, facts))} · <code>{escape(run.id)}</code></p></div>"
        '<button id="theme" type="button" title="light or dark">◐</button></header>'
    )


def _error(run: RunReport) -> str:
    error = run.error
    if error is None:
        return ""
    failed = next((step for step in run.steps if step.error is not None), None)
    row = failed.row if failed is not None else ""
    trace = (failed.traceback if failed is not None else "") or run.traceback
    rows = "".join(
        f"<dt>{name}</dt><dd>{_as_said(str(error[name]))}</dd>"
        for name in ("where", "expected", "found")
        if error.get(name)
    )
    hints = "".join(f"<li>{escape(hint)}</li>" for hint in error.get("hints", []))
    return (
        f'<div class="error"><strong>error[{escape(str(error["code"]))}]</strong> {escape(str(error["what"]))}'
        f"<dl>{rows}</dl>"
        + (f"<p class='note'>the row</p><pre>{escape(row)}</pre>" if row else "")
        + f"<ul>{hints}</ul>"
        + (f"<details><summary>traceback</summary><pre>{escape(trace)}</pre></details>" if trace else "")
        + "</div>"
    )


def _as_said(text: str) -> str:
    """A traceback or a compiler's message keeps its lines."""
    return f"<pre>{escape(text)}</pre>" if "\n" in text else escape(text)


def _results(run: RunReport) -> str:
    return _fan_out(run) + "".join(
        f"<h3>{escape(step.key)}{_made_by(step)}</h3>{_summary(step.summary)}"
        for step in _goals_first(run)
        if step.summary
    )


def _fan_out(run: RunReport) -> str:
    """What instances of fanned-out stages came to."""
    instances = {step.key: step.plan.get("instance") or {} for step in run.steps}
    tables = spread_tables(
        Outcome(step.key, step.summary, instances[step.key].get("stage", ""), instances[step.key].get("labels"))
        for step in run.steps
    )
    parts = []
    for title, table in tables.items():
        heading = f"<h3>{escape(title)} <span class='note'>{MEANING}</span></h3>"
        parts.append(f"{heading}{_table('', as_text(table))}")
    return "".join(parts)


def _summary(summary: Mapping[str, Any]) -> str:
    changes = {name: value for name, value in summary.items() if is_change(value)}
    facts = " · ".join(
        f"{escape(name.replace('_', ' '))} <b>{_value(value)}</b>"
        for name, value in summary.items()
        if name not in changes and not is_table(value)
    )
    table = ""
    if changes:
        rows = "".join(_result_row(name, value) for name, value in changes.items())
        table = (
            '<table class="results"><thead><tr><th>measure</th><th>before</th><th>after</th><th>change</th></tr>'
            f"</thead><tbody>{rows}</tbody></table>"
        )
    tables = "".join(_table(name, value) for name, value in summary.items() if is_table(value))
    return table + tables + (f'<p class="facts">{facts}</p>' if facts else "")


def _table(name: str, table: Mapping[str, Mapping[str, Any]]) -> str:
    """Row → column → number."""
    columns = columns_of(table)
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join(
        f"<tr><td>{escape(row)}</td>"
        + "".join(f'<td class="value">{_value(cells[c]) if c in cells else ""}</td>' for c in columns)
        + "</tr>"
        for row, cells in table.items()
    )
    title = escape(name.replace("_", " "))
    return f"<table><thead><tr><th>{title}</th>{head}</tr></thead><tbody>{body}</tbody></table>"


def _goals_first(run: RunReport) -> list[StepReport]:
    """What was asked for, then what it needed."""
    return sorted(run.steps, key=lambda step: step.key not in run.goals)


def _result_row(name: str, value: Mapping[str, Any]) -> str:
    label = f"<td>{escape(name.replace('_', ' '))}</td>"
    before, after = as_float(value["before"]), as_float(value["after"])
    difference, verdict = compared(name, value)
    share = ""
    if difference and verdict != "same" and before and after is not None:
        share = f" ({100 * (after - before) / abs(before):+.0f} %)"
    change = f'<span class="{verdict or "same"}">{difference}{share}</span>' if difference else ""
    rest = " · ".join(
        f"{key.replace('_', ' ')} {_value(item)}"
        for key, item in value.items()
        if key not in ("before", "after", "better")
    )
    note = f'<div class="note">{escape(rest)}</div>' if rest else ""
    return (
        f'<tr>{label}<td class="value">{_value(value["before"])}</td>'
        f'<td class="value strong">{_value(value["after"])}</td>'
        f"<td>{change}{note}</td></tr>"
    )


def _value(value: Any) -> str:
    return escape(values_of(value))


def _hints(run: RunReport) -> str:
    parts = []
    for step in run.steps:
        for hint in step.hints:
            command = " ".join(hint.get("overrides", []))
            parts.append(
                f'<div class="hint"><p><strong>{escape(str(hint.get("because", "")))}</strong> '
                f'<span class="note">{escape(step.key)}</span></p><p>{escape(str(hint.get("advice", "")))}</p>'
                + (f"<pre>{escape(command)}</pre>" if command else "")
                + "</div>"
            )
        answered = {hint.get("name") for hint in step.hints}
        for name, numbers in step.signals.items():
            if name not in answered:
                shown = ", ".join(f"{key} {number(value)}" for key, value in numbers.items())
                parts.append(
                    f'<div class="hint"><p><strong>{escape(name)}</strong> {escape(shown)} '
                    f'<span class="note">{escape(step.key)}</span></p></div>'
                )
    return "".join(parts)


def _plan(run: RunReport) -> str:
    nodes = []
    for step in run.steps:
        parents = tuple(
            (str(source.get("step", "")), f"{port} ← {source.get('step') or source.get('ref')}")
            for port, source in step.plan.get("inputs", {}).items()
        )
        timed = step.seconds is not None and step.state != "pending"
        note = f"{step.state} · {seconds(step.seconds or 0.0)}" if timed else step.state
        if step.plan.get("inserted"):
            note += " · inserted"
        nodes.append(Node(step.key, step.key, note, step.state, parents))
    if not nodes:
        return ""
    spent = {step.key: step.seconds for step in run.steps if step.state == "ran" and step.seconds}
    where = bars(spent) if len(spent) > 1 else ""
    return f"{plan_graph(nodes)}{where}"


def _metrics(run: RunReport) -> str:
    return "".join(
        f"<h3>{escape(step.key)}{_made_by(step)}</h3>{step_metrics(step)}"
        for step in _goals_first(run)
        if step.curves or len(step.phases) > 1
    )


def _samples(run: RunReport) -> str:
    parts = []
    for step in _goals_first(run):
        if not step.samples:
            continue
        parts.append(f"<h3>{escape(step.key)}</h3>")
        for title, chosen in _by_kind(step.samples):
            rows = "".join(_sample(sample) for sample in chosen)
            parts.append(f'<h4>{escape(title)}</h4><div class="samples">{rows}</div>')
    return "".join(parts)


def _by_kind(samples: Sequence[Mapping[str, Any]]) -> list[tuple[str, Sequence[Mapping[str, Any]]]]:
    """Best and worst by reward of the whole run, the latest, and the first ones to compare them with."""
    if len(samples) <= 2 * _SHOWN_SAMPLES:
        return [("", samples)]
    graded = [each for each in samples if isinstance(each.get("reward"), int | float)]
    ranked = sorted(graded, key=lambda each: -each["reward"])
    kinds = [("best", ranked[:_SHOWN_SAMPLES]), ("worst", ranked[::-1][:_SHOWN_SAMPLES])] if ranked else []
    latest, first = samples[::-1][:_SHOWN_SAMPLES], samples[:_SHOWN_SAMPLES]
    return [*kinds, ("latest", latest), ("first", first)]


def _sample(sample: Mapping[str, Any]) -> str:
    facts = [
        f"{escape(name.replace('_', ' '))} <b>{_value(value)}</b>"
        for name, value in sample.items()
        if name not in _ASIDE and value not in (None, {}, [], "")
    ]
    prompt, response = sample.get("prompt"), sample.get("response", sample.get("text"))
    texts = "".join(
        f'<div class="{kind}"><span>{kind}</span><pre>{escape(_text(text))}</pre></div>'
        for kind, text in (("prompt", prompt), ("response", response))
        if text is not None
    )
    return f'<article>{texts}{_judge(sample.get("judge"))}<p class="note">{" · ".join(facts)}</p></article>'


def _judge(notes: Any) -> str:
    """What the judge said of an answer, question by question: its verdict, and its reasoning folded away."""
    parts = []
    for note in notes if isinstance(notes, list) else ():
        if not isinstance(note, Mapping):
            continue
        about = " · ".join(
            f"{escape(str(name))} {escape(_text(value))}"
            for name, value in note.items()
            if name not in ("reasoning", "verdict")
        )
        reasoning, verdict = note.get("reasoning"), note.get("verdict")
        parts.append(
            (f"<p class='note'>{about}</p>" if about else "")
            + (
                f"<details><summary>reasoning</summary><pre>{escape(_text(reasoning))}</pre></details>"
                if reasoning
                else ""
            )
            + (f"<pre>{escape(_text(verdict))}</pre>" if verdict else "")
        )
    return f'<div class="judge"><span>judge</span><div>{"".join(parts)}</div></div>' if parts else ""


def _text(value: Any) -> str:
    return value if isinstance(value, str) else "\n".join(str(each) for each in value) if value else str(value)


def _artifacts(run: RunReport) -> str:
    cards = []
    for step in run.steps:
        for port, ref in step.outputs.items():
            artifact = run.artifacts.get(ref)
            facts = _artifact_facts(artifact) if artifact is not None else "<dd>gone</dd>"
            cards.append(
                f'<article class="artifact"><p><code>{escape(ref)}</code> '
                f'<span class="note">{escape(step.key)} → {escape(port)}</span></p><dl>{facts}</dl></article>'
            )
    return "".join(cards)


def _artifact_facts(artifact: Artifact) -> str:
    count = f"{len(artifact.files)} file" + ("" if len(artifact.files) == 1 else "s")
    size = readable_size(sum(record.size for record in artifact.files))
    facts = {
        "type": f'{escape(artifact.type)} <span class="note">{short_digest(artifact.digest)}</span>',
        "size": f'{size} <span class="note">{count}</span>',
        "made from": "".join(
            f"<div>{escape(edge.port)} ← <code>{escape(edge.ref or short_digest(edge.digest))}</code></div>"
            for edge in artifact.inputs
        ),
        "attributes": _folded(
            "".join(
                f"<div><span class='note'>{escape(name)}</span> {_value(value)}</div>"
                for name, value in artifact.attributes.items()
            ),
            len(artifact.attributes),
        ),
    }
    return "".join(f"<dt>{name}</dt><dd>{content}</dd>" for name, content in facts.items() if content)


def _folded(content: str, count: int) -> str:
    return content if count <= 3 else f"<details><summary>{count} attributes</summary>{content}</details>"


def _config(run: RunReport) -> str:
    targets = run.request.get("targets")
    parts = []
    if targets:
        import shlex

        words = [*targets, *(["-c", run.request["config"]] if run.request.get("config") else [])]
        words += [
            part for port, ref in (run.request.get("inputs") or {}).items() for part in ("--input", f"{port}={ref}")
        ]
        words += [part for text in run.request.get("over") or [] for part in ("--over", text)]
        words += run.request.get("overrides") or []
        parts.append(f"<pre>steps run {escape(shlex.join(words))}</pre>")
    if run.config:
        parts.append(
            f"<details><summary>merged config of every step</summary><pre>{escape(run.config)}</pre></details>"
        )
    return "".join(parts)


def _made_by(step: StepReport) -> str:
    return f' <span class="note">from run {escape(step.made_by)}</span>' if step.made_by else ""
