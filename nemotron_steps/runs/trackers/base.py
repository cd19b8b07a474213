"""What experiment trackers share: they go quiet where they cannot write, and what they write has flat names."""

import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Any, ClassVar

from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.config.profiles import MirrorSettings, OpenTable, Table, tracker_class
from nemotron_steps.errors import UnsupportedError
from nemotron_steps.errors.plugins import load_object
from nemotron_steps.resolver.plan import Plan
from nemotron_steps.runs.context import Record
from nemotron_steps.runs.run_folder import RunFolder
from nemotron_steps.stopping import left_to_us
from nemotron_steps.waiting import waiting

logger = logging.getLogger(__name__)

_BUILT_IN = {"wandb": "wandb:WandbTracker", "tensorboard": "tensorboard:TensorBoardTracker"}
_SAMPLES = 2000
"""Samples of a step at most, the latest kept: W&B draws no larger tables."""


class ExperimentTracker(ABC):
    """A listener that is closed at the end of the run, however it ended."""

    target: ClassVar[str]
    """What it writes to."""
    module: ClassVar[str]
    """Of its package."""
    table: ClassVar[str]
    """Of env.toml; the extra that brings the package has the same name."""
    settings_model: ClassVar[type[Table]] = OpenTable
    """What the table of a tracker of another package is checked against."""
    _run: Any = None
    """What is open there for a step."""

    def __init__(
        self, settings: Any, folder: RunFolder, plan: Plan, store: ArtifactStore, redact: Callable[[Any], Any]
    ) -> None:
        try:
            self._package: Any = import_module(self.module)
        except ImportError as error:
            raise UnsupportedError(
                f"the [{self.table}] table of env.toml needs the package {self.module}, which is not installed",
                where=f"[{self.table}]",
                found=str(error),
                hints=(f"pip install 'nemotron-steps[{self.table}]'",),
            ) from error
        self._settings = settings
        self._folder = folder
        self._plan = plan
        self._store = store
        self._redact = redact
        self._samples: deque[dict[str, Any]] = deque(maxlen=_SAMPLES)

    def __call__(self, record: Record) -> None:
        """ExperimentTracker one record."""
        handler = getattr(self, f"_on_{record['kind']}", None)
        if handler is not None and (record["kind"] == "step_started" or self._run is not None):
            self._trying(lambda: handler(record))

    def close(self) -> None:
        """Write what is left. Also called for a run that was interrupted."""
        if self._run is not None:
            self._trying(self._interrupt)

    @abstractmethod
    def _interrupt(self) -> None:
        """End what is open, as interrupted."""

    def _trying(self, mirror: Callable[[], None]) -> None:
        try:
            with left_to_us(), waiting(self.target):
                mirror()
        # Of every class: their clients raise ValueError and TypeError, and what their stores raise (botocore's,
        # sqlalchemy's, a driver's ImportError).
        except Exception as error:
            text = f"the {self.target} mirror stops here, the run goes on: {error} ({type(error).__name__})"
            if "API key" in str(error):
                text += "; hint: export WANDB_MODE=offline   # `wandb sync` sends it later"
            logger.warning(text)
            self._run = None


def trackers(
    settings: MirrorSettings, folder: RunFolder, plan: Plan, store: ArtifactStore, redact: Callable[[Any], Any]
) -> Iterator[ExperimentTracker]:
    """Every tracker that env.toml has a table for. UnsupportedError if a package it needs is not installed."""
    for name in settings.names:
        built_in = _BUILT_IN.get(name)
        tracker = load_object(f"{__package__}.{built_in}") if built_in else tracker_class(name)
        yield tracker(getattr(settings, name) if built_in else settings.others[name], folder, plan, store, redact)


def leaves(value: Any, path: str, separator: str) -> Iterator[tuple[str, Any]]:
    """(joined keys, value) of everything below a mapping, however deep; `path` is the name of the value itself."""
    if isinstance(value, Mapping) and value:
        for name, item in value.items():
            yield from leaves(item, f"{path}{separator}{name}" if path else str(name), separator)
    elif path:
        yield path, value
