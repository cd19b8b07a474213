"""A mirror of a run in TensorBoard's event files: a folder for each executed step, with metrics, summary and samples.

`tensorboard --logdir DIR` shows them, several runs beside each other.
"""

from pathlib import Path
from typing import Any

from nemotron_steps.runs.context import Record
from nemotron_steps.runs.trackers.base import ExperimentTracker, leaves


class TensorBoardTracker(ExperimentTracker):
    """See ExperimentTracker."""

    target, module, table = "TensorBoard", "tensorboardX", "tensorboard"
    _index = 0

    def _on_step_started(self, record: Record) -> None:
        given = self._settings.folder
        folder = Path(given).expanduser() / self._folder.id if given else self._folder.path / "tensorboard"
        # Step ids have slashes, which become folders: TensorBoard groups by them.
        self._run = self._package.SummaryWriter(str(folder / record["step"]), flush_secs=10)
        self._index = 0

    def _on_metrics(self, record: Record) -> None:
        self._index = record["index"]
        for name, value in record["values"].items():
            if isinstance(value, int | float):
                self._run.add_scalar(name, value, self._index, walltime=record["time"])

    def _on_summary(self, record: Record) -> None:
        for name, value in leaves(record["values"], "summary", "/"):
            if isinstance(value, int | float):
                self._run.add_scalar(name, value, self._index)
            elif isinstance(value, str):
                self._run.add_text(name, _code(value), self._index)

    def _on_sample(self, record: Record) -> None:
        sample = record["sample"]
        name = "/".join(("samples", *(str(sample[key]) for key in ("environment", "which") if sample.get(key))))
        text = "\n\n".join(f"**{key}**\n\n{_code(value)}" for key, value in sample.items())
        self._run.add_text(name, text, sample.get("step", self._index))

    def _on_signal(self, record: Record) -> None:
        numbers = ", ".join(f"{name}={value}" for name, value in record["numbers"].items())
        self._run.add_text("signals", f"**{record['name']}** {numbers}", self._index)

    def _on_step_failed(self, record: Record) -> None:
        self._run.add_text("error", _code(record["error"]["what"]), self._index)
        self._interrupt()

    def _interrupt(self, _: Record | None = None) -> None:
        writer, self._run = self._run, None
        writer.close()

    _on_step_finished = _interrupt


def _code(value: Any) -> str:
    """A value as a block of Markdown code: what a model wrote is shown, not rendered."""
    return "\n".join(f"    {line}" for line in str(value).splitlines())
