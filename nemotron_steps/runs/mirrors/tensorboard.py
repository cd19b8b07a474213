"""A mirror of a run in TensorBoard's event files: a folder for each executed step, with metrics, summary and samples.

`tensorboard --logdir DIR` shows them, several runs beside each other.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemotron_steps.errors import UnsupportedError
from nemotron_steps.runs.mirrors.leaves import leaves
from nemotron_steps.runs.run_folder import RunFolder
from nemotron_steps.runs.tracker import Record

if TYPE_CHECKING:
    from nemotron_steps.config.mirrors import TensorBoardSettings

logger = logging.getLogger(__name__)


class TensorBoardMirror:
    """A listener. A folder that cannot be written to never stops a run: the mirror says so in the log and goes quiet.

    Event files are in `<folder>/<run id>/<step>`, or `<run folder>/tensorboard/<step>` where no folder is given.

    Raises UnsupportedError if the tensorboardX package is not installed.
    """

    def __init__(self, settings: TensorBoardSettings, folder: RunFolder) -> None:
        try:
            from tensorboardX import SummaryWriter
        except ImportError as error:
            raise UnsupportedError(
                "env.toml has a [tensorboard] table and the tensorboardX package is not installed",
                where="[tensorboard]",
                hints=("pip install 'nemotron-steps[tensorboard]'",),
            ) from error
        self._writer_class: Any = SummaryWriter
        given = None if settings.folder is None else Path(settings.folder).expanduser() / folder.id
        self._folder = given or folder.path / "tensorboard"
        self._writer: Any = None
        self._index = 0

    def __call__(self, record: Record) -> None:
        """Mirror one record."""
        handler = getattr(self, f"_on_{record['kind']}", None)
        if handler is None or (record["kind"] != "step_started" and self._writer is None):
            return
        self._trying(lambda: handler(record))

    def close(self) -> None:
        """End the file that is open, if one is."""
        self._trying(self._finish)

    def _trying(self, mirror: Callable[[], None]) -> None:
        try:
            mirror()
        except Exception as error:  # of every class: what the writer raises is its own affair
            logger.warning("the TensorBoard mirror stops here, the run goes on: %s (%s)", error, type(error).__name__)
            self._writer = None

    def _on_step_started(self, record: Record) -> None:
        # Step ids have slashes, which become folders: TensorBoard groups by them.
        self._writer = self._writer_class(str(self._folder / record["step"]), flush_secs=10)
        self._index = 0

    def _on_metrics(self, record: Record) -> None:
        self._index = record["index"]
        for name, value in record["values"].items():
            if isinstance(value, int | float):
                self._writer.add_scalar(name, value, self._index, walltime=record["time"])

    def _on_summary(self, record: Record) -> None:
        for name, value in leaves(record["values"], "summary", "/"):
            if isinstance(value, int | float):
                self._writer.add_scalar(name, value, self._index)
            elif isinstance(value, str):
                self._writer.add_text(name, _code(value), self._index)

    def _on_sample(self, record: Record) -> None:
        sample = record["sample"]
        name = "/".join(("samples", *(str(sample[key]) for key in ("environment", "which") if sample.get(key))))
        text = "\n\n".join(f"**{key}**\n\n{_code(value)}" for key, value in sample.items())
        self._writer.add_text(name, text, sample.get("step", self._index))

    def _on_signal(self, record: Record) -> None:
        numbers = ", ".join(f"{name}={value}" for name, value in record["numbers"].items())
        self._writer.add_text("signals", f"**{record['name']}** {numbers}", self._index)

    def _on_step_finished(self, record: Record) -> None:
        self._finish()

    def _on_step_failed(self, record: Record) -> None:
        self._writer.add_text("error", _code(record["error"]["what"]), self._index)
        self._finish()

    def _finish(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()


def _code(value: Any) -> str:
    """A value as a block of Markdown code: what a model wrote is shown, not rendered."""
    return "\n".join(f"    {line}" for line in str(value).splitlines())
