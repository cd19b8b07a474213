"""index.html: every run and artifact of a home on one page, opened from disk without a server or a network.

Written from the records alone. Everything on it came from a run or a user and is escaped.
"""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from urllib.parse import quote

from nemotron_steps.artifacts.files import write_atomic
from nemotron_steps.artifacts.integrity import OBJECTS, place_of
from nemotron_steps.artifacts.models import Artifact
from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.errors import ArtifactError
from nemotron_steps.runs.lines import readable_size, seconds
from nemotron_steps.runs.run_folder import KILLED, RunInfo, list_runs

INDEX_NAME = "index.html"

_Cell = tuple[str, str | float]
"""HTML, and what it is sorted by."""


def write_index(store: ArtifactStore, path: Path | None = None) -> Path:
    """Write the page, by default into the home (its local copy, of one on an object store); returns where.

    Links are relative, so a home that is copied or served whole keeps working.
    """
    home = store.backend.scratch
    path = path or home / INDEX_NAME
    artifacts = [_placed(artifact, store) for artifact in store.list_artifacts()]
    page = render_index(store.backend.url, list_runs(store), artifacts, home, path.absolute().parent)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, page.encode())
    return path


def _placed(artifact: Artifact, store: ArtifactStore) -> Artifact:
    """An artifact at the folder that a link may lead to; one where nothing is, for a folder that may be anybody's."""
    try:
        return artifact.at(place_of(store, artifact))
    except ArtifactError:
        return artifact.at(store.backend.scratch / OBJECTS / artifact.digest)


def render_index(title: str, runs: Sequence[RunInfo], artifacts: Sequence[Artifact], home: Path, folder: Path) -> str:
    """The whole page.

    Args:
        title: where the home is.
        home: where runs and artifacts lie on this machine.
        folder: where the page will lie; links are relative to it.
    """
    assets = files("nemotron_steps.runs") / "report_assets"
    style = "".join((assets / name).read_text(encoding="utf-8") for name in ("report.css", "index.css"))
    script = "".join((assets / name).read_text(encoding="utf-8") for name in ("report.js", "index.js"))
    run_rows = [_run(info, home, folder) for info in sorted(runs, key=lambda info: info.created, reverse=True)]
    newest = sorted(artifacts, key=lambda artifact: artifact.created, reverse=True)
    artifact_rows = [_artifact(artifact, home, folder) for artifact in newest]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Runs and artifacts</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{style}</style></head><body>"
        f"<header><div><h1>Runs and artifacts</h1><p>{escape(title)} · "
        f"{escape(time.strftime('%Y-%m-%d %H:%M'))}</p></div>"
        '<button id="theme" type="button" title="light or dark">◐</button></header>'
        '<nav><a href="#runs">Runs</a><a href="#artifacts">Artifacts</a>'
        '<input id="filter" type="search" placeholder="filter: words, all of them" aria-label="filter"></nav><main>'
        + _section("runs", "Runs", ("run", "asked for", "status", "steps", "began", "took"), run_rows)
        + _section("artifacts", "Artifacts", ("artifact", "type", "size", "made by", "committed"), artifact_rows)
        + f"</main><script>{script}</script></body></html>\n"
    )


def _section(anchor: str, title: str, columns: Iterable[str], rows: Sequence[Sequence[_Cell]]) -> str:
    head = "".join(f'<th aria-sort="none"><button type="button">{name}</button></th>' for name in columns)
    body = "".join(
        "<tr>" + "".join(f'<td data-by="{escape(str(by))}">{html}</td>' for html, by in row) + "</tr>" for row in rows
    )
    return (
        f'<section id="{anchor}"><h2>{title} <span class="note count">{len(rows)}</span></h2>'
        f'<div class="scroll"><table class="sortable"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
        "</section>"
    )


def _run(info: RunInfo, home: Path, folder: Path) -> list[_Cell]:
    report = home / "runs" / info.id / "report.html"
    name = _link(info.id, report, folder) if report.is_file() else escape(info.id)
    states = [str(step.get("state", "pending")) for step in info.steps.values()]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    error = f'<div class="note">{escape(str(info.error.get("what", "")))}</div>' if info.error else ""
    # A killed run could not write down when it ended.
    took = 0.0 if info.status == KILLED else max(info.updated - info.created, 0.0)
    return [
        (f"<code>{name}</code>", info.id),
        (f"<code>{escape(_asked(info))}</code>{error}", _asked(info)),
        (f'<span class="state {escape(info.status)}">{escape(info.status)}</span>', info.status),
        (escape(counts), len(states)),
        (escape(_date(info.created)), info.created),
        (escape(seconds(took)) if took else "", took),
    ]


def _artifact(artifact: Artifact, home: Path, folder: Path) -> list[_Cell]:
    path = artifact.path
    name = _link(artifact.ref, path, folder) if path.is_dir() else escape(artifact.ref)
    size = sum(record.size for record in artifact.files)
    made_by = escape(f"added from {artifact.source}" if artifact.source else "added")
    if artifact.producer is not None:
        report = home / "runs" / artifact.producer.run / "report.html"
        run = artifact.producer.run
        linked = _link(run, report, folder) if report.is_file() else escape(run)
        made_by = f'{escape(artifact.producer.step)} <div class="note">{linked}</div>'
    inputs = "".join(
        f'<div class="note">{escape(edge.port)} ← {escape(edge.ref or edge.digest[:12])}</div>'
        for edge in artifact.inputs
    )
    return [
        (f"<code>{name}</code>{inputs}", artifact.ref),
        (escape(artifact.type), artifact.type),
        (readable_size(size), size),
        (made_by, artifact.producer.step if artifact.producer else ""),
        (escape(_date(artifact.created)), artifact.created),
    ]


def _asked(info: RunInfo) -> str:
    targets = info.request.get("targets")
    if not isinstance(targets, list):
        return info.name
    config, over, overrides = (info.request.get(name) for name in ("config", "over", "overrides"))
    words = [*targets, *(["-c", config] if config else [])]
    words += [part for text in (over if isinstance(over, list) else []) for part in ("--over", text)]
    words += overrides if isinstance(overrides, list) else []
    return shlex.join(str(word) for word in words)


def _link(text: str, target: Path, folder: Path) -> str:
    # "./" keeps a first part with a colon from being read as a scheme.
    relative = "./" + quote(Path(os.path.relpath(target.absolute(), folder)).as_posix())
    return f'<a href="{escape(relative)}">{escape(text)}</a>'


def _date(when: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(when))
