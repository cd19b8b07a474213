"""index.html: every run and artifact of a home on one page, opened from disk without a server or a network.

Written from the records alone. Everything on it came from a run or a user and is escaped by its template.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from nemotron_steps.artifacts.files import write_atomic
from nemotron_steps.artifacts.integrity import OBJECTS, place_of
from nemotron_steps.artifacts.models import Artifact
from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.errors import ArtifactError
from nemotron_steps.runs.report import command_of, render
from nemotron_steps.runs.run_folder import KILLED, RunInfo, list_runs

INDEX_NAME = "index.html"


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

    def link(target: Path) -> str:
        # "./" keeps a first part with a colon from being read as a scheme.
        return "./" + quote(Path(os.path.relpath(target.absolute(), folder)).as_posix())

    def report_of(run: str) -> str:
        report = home / "runs" / run / "report.html"
        return link(report) if report.is_file() else ""

    return render(
        "index.html",
        title=title,
        now=time.time(),
        runs=sorted(runs, key=lambda info: info.created, reverse=True),
        artifacts=sorted(artifacts, key=lambda artifact: artifact.created, reverse=True),
        report_of=report_of,
        folder_of=lambda artifact: link(artifact.path) if artifact.path.is_dir() else "",
        asked_for=lambda run: command_of(run.request) or run.name,
        counts=_counts,
        # A killed run could not write down when it ended.
        time_taken=lambda run: 0.0 if run.status == KILLED else max(run.updated - run.created, 0.0),
    )


def _counts(run: RunInfo) -> str:
    """`2 ran, 1 failed`."""
    states = [str(step.get("state", "pending")) for step in run.steps.values()]
    return ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
