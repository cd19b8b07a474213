"""A run, read from its folder: while it works, when it is done, and long afterwards."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from nemotron_steps.api.artifacts import Artifacts
from nemotron_steps.artifacts.export import export, free_folder
from nemotron_steps.artifacts.files import write_atomic
from nemotron_steps.artifacts.models import Artifact
from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.config.names import nearest
from nemotron_steps.errors import RequestError, UnknownNameError
from nemotron_steps.manifest.registry import load_registry
from nemotron_steps.runs.log_format import in_words, number, seconds
from nemotron_steps.runs.report.data import RunReport, read_report
from nemotron_steps.runs.report.page import curve, headlines
from nemotron_steps.runs.run_folder import DONE, KILLED, get_run, run_file
from nemotron_steps.session.jobs import AT_WORK, JobView
from nemotron_steps.session.publish import hf_request, is_model
from nemotron_steps.session.session import Session

Series = dict[int, float]
"""Training step → number."""
# Colours that can be read on a light page and on a dark one: a notebook's theme is not known here.
_STYLE = """\
.nemotron-steps .charts{display:flex;flex-wrap:wrap;gap:12px} .nemotron-steps figure{margin:0;width:300px}
.nemotron-steps svg text{fill:currentColor;opacity:.65;font:10px sans-serif} .nemotron-steps svg .dot{fill:#5a9e1b}
.nemotron-steps svg .grid{stroke:currentColor;opacity:.18} .nemotron-steps svg .raw{opacity:.4}
.nemotron-steps svg .line,.nemotron-steps svg .raw{fill:none;stroke:#5a9e1b} .nemotron-steps td{text-align:left}"""


@dataclass(frozen=True)
class Plot:
    """Curves of metrics. A notebook draws it; `save` writes it as a page."""

    series: Mapping[str, Mapping[int, float]]
    """Name → training step → number."""
    title: str = ""

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write it as a page of its own and return its path."""
        file = Path(path)
        page = f'<!doctype html><meta charset="utf-8"><title>{escape(self.title)}</title>{self._repr_html_()}\n'
        write_atomic(file, page.encode())
        return file

    def _repr_html_(self) -> str:
        figures = [
            f"<figure><figcaption>{escape(name)} <b>{number(list(points.values())[-1])}</b></figcaption>"
            f"{curve([(float(step), value) for step, value in points.items()], name)}</figure>"
            for name, points in self.series.items()
            if points
        ]
        return f'<div class="nemotron-steps"><style>{_STYLE}</style><div class="charts">{"".join(figures)}</div></div>'


@dataclass(frozen=True)
class StepRun:
    """One step of a run."""

    key: str
    state: str
    """ran, cached, reused, failed, interrupted, running or pending."""
    seconds: float | None
    """What it took when it was made."""
    outputs: Mapping[str, Artifact]
    """Port → artifact, those of them that are still there."""
    summary: Mapping[str, Any]
    """What it reported at its end."""
    metrics: Mapping[str, Series]
    """Name → training step → number."""
    hints: Sequence[Mapping[str, Any]]
    """What to change, where it raised signals."""
    samples: Sequence[Mapping[str, Any]]
    """Examples of what the policy answered."""


def model_ports(made: Mapping[str, Artifact]) -> list[str]:
    """The ports of a step's outputs that are models."""
    types = load_registry().types
    return [port for port, each in made.items() if is_model(each.type, types)]


class Result:
    """A run of a home. Everything is read from its folder when it is asked for, and kept once it is over.

    Attributes:
        id: as `steps runs` shows it.
    """

    def __init__(self, store: ArtifactStore, run_id: str) -> None:
        self.id = run_id
        self._store = store
        self._read: RunReport | None = None
        self._job = JobView(store, run_id)

    @property
    def _report(self) -> RunReport:
        """What its files say; what they said at its end is kept."""
        if self._read is not None:
            return self._read
        over = get_run(self._store, self.id).status not in AT_WORK
        for name in ("run.json", "plan.json", "config.yaml", "events.jsonl", "metrics.jsonl", "samples.jsonl"):
            with suppress(UnknownNameError):  # of a run elsewhere that ended early
                run_file(self._store, self.id, name)
        report = read_report(self.folder, self._store)
        self._read = report if over else None
        return report

    @property
    def status(self) -> str:
        """done, failed, interrupted, running, submitted or killed: its job is over, and it did not say how it ended."""
        info = self._job.look()
        if info.status in AT_WORK:
            job = self._job.ask(info)
            if job is not None and job.state.over:
                # Looked at again: it may have ended between the two questions.
                now = self._job.look().status
                return KILLED if now in AT_WORK else now
        return info.status

    def wait(self, *, progress: bool = True) -> Result:
        """Wait until a run that a profile's executor works on is over; returns this result.

        Args:
            progress: show its log meanwhile.

        Raises:
            StepsError: what it ended with.
            RequestError: another process works on it.
        """
        from nemotron_steps.cli.run import write_log
        from nemotron_steps.runs.launch import error_of, follow

        info = get_run(self._store, self.id)
        failure = None if info.job else error_of(info)
        if failure is not None:
            raise failure
        if info.job:
            follow(self._store, self.id, write_log if progress else (lambda text: None))
        elif info.status != DONE:
            raise RequestError(f"no executor works on run '{self.id}'", hints=(f"steps watch {self.id}",))
        return self

    def cancel(self) -> None:
        """Ask the executor that works on it to stop; what it committed stays. RequestError if there is none."""
        from nemotron_steps.runs.launch import cancel

        cancel(self._store, get_run(self._store, self.id))

    @property
    def folder(self) -> Path:
        """The run's folder on this machine."""
        return self._store.backend.local(f"runs/{self.id}")

    @property
    def report(self) -> Path:
        """The page about it, to be opened in a browser. UnknownNameError while there is none."""
        return run_file(self._store, self.id, "report.html")

    @property
    def error(self) -> dict[str, Any] | None:
        """What it ended with, as StepsError.to_dict; None for a run that did not fail."""
        return self._report.error

    @property
    def steps(self) -> dict[str, StepRun]:
        """Every step by its key, in the plan's order."""
        known = self._report.artifacts
        return {
            step.key: StepRun(
                step.key,
                step.state,
                step.seconds,
                {port: known[ref] for port, ref in step.outputs.items() if ref in known},
                step.summary,
                {name: {int(index): value for index, value in points} for name, points in step.curves.items()},
                step.hints,
                step.samples,
            )
            for step in self._report.steps
        }

    @property
    def outputs(self) -> dict[str, Artifact]:
        """Port → artifact of the last step asked for."""
        return dict(self._goal.outputs)

    def save(self, folder: str | os.PathLike[str], *, hf: bool = False) -> Path:
        """Copy the model of the last step asked for that makes one into a new or empty folder, verified; that folder.
        `hf`: as a Hugging Face folder, converted where it is none.

        Raises UnknownNameError where that step made none, or several: `outputs[PORT].save` has any."""
        steps = self.steps
        types, asked = load_registry().types, [step for step in self._report.steps if step.key in self._report.goals]
        making = [s.key for s in asked if any(is_model(each, types) for each in s.plan.get("produces", {}).values())]
        made = steps[making[-1]].outputs if making else {}
        models = model_ports(made)
        if len(models) != 1:
            hints = [f"result.outputs[{port!r}].save({os.fspath(folder)!r})" for port in models or self.outputs]
            what = f"run '{self.id}' made {'several models at once' if models else 'no model'}"
            raise UnknownNameError(what, found=", ".join(models or self.outputs) or "no output", hints=hints)
        model, store = made[models[0]], self._store
        command = f"steps artifacts export {'--hf ' if hf else ''}{model.ref}"
        free_folder(model, Path(folder), command)
        request = hf_request(model, load_registry()) if hf else None
        if request is not None:
            from nemotron_steps.api.planned import run_request

            session = Session(store.backend.url)
            converted = run_request(session, request, force=False, resume=None, wait=True, progress=False)
            (model,) = converted.outputs.values()
        return export(store, model, Path(folder), command=command)

    @property
    def summary(self) -> dict[str, Any]:
        """What the last step asked for reported at its end."""
        return dict(self._goal.summary)

    @property
    def metrics(self) -> dict[str, Series]:
        """Name → training step → number, of the last step asked for; step 0 is before the training.

        `pandas.DataFrame(result.metrics).sort_index()` is a table.
        """
        return dict(self._goal.metrics)

    @property
    def artifacts(self) -> Artifacts:
        """The home that it is in."""
        return Artifacts.of(self._store)

    def plot(self, *names: str, step: str | None = None) -> Plot:
        """Curves of metrics; a notebook draws them.

        Args:
            names: which; none: reward, loss and what else tells how the training goes.
            step: of which step; None: the last one asked for.

        Raises UnknownNameError for a metric that was not reported.
        """
        found = self._goal if step is None else self.steps[step]
        known = list(found.metrics)
        for name in names:
            if name not in known:
                close = nearest(name, known)
                what, hints = f"{found.key} reported no metric '{name}'", [f"plot({other!r})" for other in close[:2]]
                raise UnknownNameError(what, expected=" or ".join(close or sorted(known)[:12]), hints=hints)
        return Plot({name: found.metrics[name] for name in names or headlines(known)}, found.key)

    @property
    def _goal(self) -> StepRun:
        report = self._report
        if not report.goals:
            hints = (f"steps status {self.id}", "result.wait()")
            raise UnknownNameError(f"run '{self.id}' has not begun", hints=hints)
        return self.steps[report.goals[-1]]

    def __repr__(self) -> str:
        return f"<Result {self.id}: {self.status}>"

    def _repr_html_(self) -> str:
        """How it went, what its last step reported, its curves."""
        took = sum(step.seconds or 0.0 for step in self.steps.values() if step.state == "ran")
        head = f"<b>{escape(self.id)}</b> · {escape(self.status)} · {seconds(took)}"
        rows = {name.replace("_", " "): in_words(name, value) for name, value in self.summary.items()}
        rows |= {port: f"{artifact.ref}  {artifact.path}" for port, artifact in self.outputs.items()}
        table = "".join(f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>" for name, value in rows.items())
        error = self.error
        told = f"<p>error[{escape(str(error['code']))}]: {escape(str(error['what']))}</p>" if error else ""
        return f"<div>{head}</div>{told}<table>{table}</table>{self.plot()._repr_html_()}"


def open_run(run: str = "latest", *, home: str | os.PathLike[str] | None = None) -> Result:
    """A run that is there already.

    Args:
        run: its id, a part of it that no other has, its name, or `latest`.
        home: a folder or an fsspec URL; None for STEPS_HOME, or `.steps`.

    Raises UnknownNameError with near ids.
    """
    store = ArtifactStore(None if home is None else os.fspath(home))
    return Result(store, get_run(store, run).id)
