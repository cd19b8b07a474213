"""Training checkpoints: when to write, how to commit, which to keep, where to resume.

A checkpoint is a folder `step_00000042/` with `policy/` and `state.json`, written beside its final name and renamed, so
that a reader sees all of it or none. With `checkpointing.save_async` training waits only for a copy in host memory.
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import shutil
import time
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from nemotron_steps.config.names import meant
from nemotron_steps.config.schema.rl import CheckpointingConfig, parse_duration
from nemotron_steps.engine.reporting import Reporter
from nemotron_steps.engine.types import Policy
from nemotron_steps.errors import RESUME, ConfigError, RetryableError, StepsError, StorageError
from nemotron_steps.waiting import waiting

STATE_FILE = "state.json"
_FOLDER = re.compile(r"step_([0-9]{8,})")
TENSOR_FILE = "state.safetensors"


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint."""

    step: int
    path: Path

    @property
    def policy_path(self) -> str:
        """Folder for Policy.load_checkpoint."""
        return str(self.path / "policy")

    def state(self) -> dict[str, Any]:
        """The loop's own state at that step."""
        state: dict[str, Any] = json.loads((self.path / STATE_FILE).read_text())
        return state

    def tensors(self) -> dict[str, torch.Tensor]:
        """The loop's own tensors (buffered rollouts); empty when none were saved."""
        path = self.path / TENSOR_FILE
        return load_file(str(path)) if path.is_file() else {}


class CheckpointManager:
    """Checkpoints of one training run under one folder."""

    def __init__(self, folder: Path, config: CheckpointingConfig, *, started: float | None = None) -> None:
        self._folder = folder
        self._config = config
        limit = config.checkpoint_must_save_by
        began = time.monotonic() if started is None else started
        self._deadline = Deadline(parse_duration(limit) if limit else None, began)
        self._writer: ThreadPoolExecutor | None = None
        self._in_flight: Future[None] | None = None
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in folder.glob("*.partial"):  # a kill while saving leaves one; nothing refers to it
            _remove(leftover)

    def all(self) -> list[Checkpoint]:
        """Committed checkpoints, oldest first. Links do not count: nothing here writes one."""
        named = [(_FOLDER.fullmatch(path.name), path) for path in self._folder.iterdir() if not path.is_symlink()]
        found = [Checkpoint(int(match[1]), path) for match, path in named if match]
        return sorted((c for c in found if (c.path / STATE_FILE).is_file()), key=lambda c: c.step)

    def latest(self) -> Checkpoint | None:
        """The newest committed checkpoint, or None."""
        committed = self.all()
        if committed:
            _refuse_links(committed[-1].path)
        return committed[-1] if committed else None

    def steps_begin(self) -> None:
        """Everything is loaded, and the first step begins."""
        self._deadline.step_begins()

    def refuse_overtime(self, step: int, total_steps: int, reporter: Reporter) -> None:
        """End the run when its time is over; called once `step` is saved. A partly trained model is not an output."""
        if not self._deadline.reached:
            return
        reporter.event("out_of_time", step=step)
        raise RetryableError(
            "the run's time is over; it goes on from the checkpoint just saved",
            where=f"checkpointing.checkpoint_must_save_by={self._config.checkpoint_must_save_by}",
            expected=f"{total_steps} steps",
            found=f"{step} trained",
            hints=[RESUME],
        )

    def due(self, step: int, last: bool) -> bool:
        """Whether the step just finished (1-based) is to be saved. Asked once after each step, which times them."""
        self._deadline.step_ended()
        return self._config.enabled and (last or step % self._config.save_period == 0 or self._deadline.reached)

    def save(
        self,
        step: int,
        policy: Policy,
        state: dict[str, Any],
        tensors: dict[str, torch.Tensor] | None = None,
        *,
        reported: Collection[str] = (),
    ) -> None:
        """Commit a checkpoint, then drop those neither newest nor among the keep_top_k best."""
        asked = time.monotonic()
        self._refuse_unknown_metric(state, reported)
        text = json.dumps(state)
        if self._config.save_async:
            self.wait()
            snapshot = policy.snapshot()
            copies = {name: tensor.clone() for name, tensor in (tensors or {}).items()}
            self._writer = self._writer or ThreadPoolExecutor(1, thread_name_prefix="checkpoint-writer")
            self._in_flight = self._writer.submit(self._write, step, snapshot.write, text, copies, asked)
        else:
            self._write(step, policy.save_checkpoint, text, tensors or {}, asked)
        self._deadline.step_begins()

    def check(self) -> None:
        """Raise what an asynchronous save failed with, if one has."""
        if self._in_flight is not None and self._in_flight.done():
            self.wait()

    def wait(self) -> None:
        """Return once no save is in flight; raise what it failed with."""
        if self._in_flight is not None:
            saving, self._in_flight = self._in_flight, None
            with waiting("a checkpoint to be written"):
                saving.result()

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.wait()
        except StepsError as failure:
            if error is None:
                raise
            error.add_note(f"besides, {failure}")  # what stopped the run comes first
        finally:
            if self._writer is not None:
                self._writer.shutdown()
                self._writer = None

    def _write(
        self, step: int, write_policy: Callable[[str], None], state: str, tensors: dict[str, torch.Tensor], asked: float
    ) -> None:
        final = self._folder / f"step_{step:08d}"
        partial = final.with_suffix(".partial")
        try:
            _remove(partial)
            (partial / "policy").mkdir(parents=True)
            write_policy(str(partial / "policy"))
            if tensors:
                save_file(tensors, str(partial / TENSOR_FILE))
            (partial / STATE_FILE).write_text(state)
            for path in [*partial.rglob("*"), partial]:  # on disk before the name is: a machine may lose power
                _flush(path)
            _remove(final)  # the same step saved again by a resumed run
            partial.rename(final)
            _flush(self._folder)
            self._deadline.saved(time.monotonic() - asked)
            keep = self._config.keep_top_k
            best = sorted(self.all(), key=self._rank, reverse=True)[:keep]
            for checkpoint in self.all():  # the newest is always kept: without it a kill would lose work
                if checkpoint not in best and checkpoint.path != final:
                    shutil.rmtree(checkpoint.path)
        except (OSError, StorageError) as error:
            shutil.rmtree(partial, ignore_errors=True)
            reason = error.found if isinstance(error, StorageError) else error.strerror
            raise StorageError(
                f"checkpoint of step {step} could not be written: {reason}",
                where=str(final),
                hints=["free disk space, then run the same command again: it goes on from the last checkpoint"],
            ) from error

    def _refuse_unknown_metric(self, state: dict[str, Any], also: Collection[str]) -> None:
        """Checkpoints that are ranked by a metric which does not exist would keep none of the best."""
        name = self._config.metric_name
        reported = {*state.get("metrics", {}), *also}
        if name is None or name in reported or any(name in c.state().get("metrics", {}) for c in self.all()):
            return
        raise ConfigError(
            f"no step has reported the metric {name}, which is to rank checkpoints",
            where=f"checkpointing.metric_name={name}",
            expected=", ".join(sorted(reported)) or "a metric of the steps",
            found=name,
            hints=[f"checkpointing.metric_name={near}" for near in (*meant(name, sorted(reported)), "null")],
        )

    def _rank(self, checkpoint: Checkpoint) -> tuple[bool, float, int]:
        """Better checkpoints have larger ranks: by the metric, or by age; without the metric, or with NaN, last."""
        name = self._config.metric_name
        value = checkpoint.state().get("metrics", {}).get(name) if name is not None else None
        if value is None or math.isnan(value):
            return (False, 0.0, checkpoint.step)
        return (True, value if self._config.higher_is_better else -value, checkpoint.step)


def _remove(path: Path) -> None:
    """Remove a folder, if there is one; of a link, the link alone."""
    if path.is_symlink():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def _refuse_links(checkpoint: Path) -> None:
    """A home may be shared: what is read as a checkpoint lies in its own folder."""
    aside = checkpoint.with_name(f"broken_{checkpoint.name}")  # a name that no checkpoint has
    for folder, folders, files in os.walk(checkpoint):
        for name in (*folders, *files):
            path = Path(folder, name)
            if path.is_symlink():
                raise StorageError(
                    "a checkpoint holds a link, which nothing here writes",
                    where=str(path),
                    expected="files of its own",
                    found=f"a link to {os.readlink(path)}",
                    hints=[
                        f"mv {shlex.quote(str(checkpoint))} {shlex.quote(str(aside))}"
                        "   # training goes on from the one before"
                    ],
                )


def _flush(path: Path) -> None:
    """Have the disk keep a file, or a folder's names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


RECENT = 20
"""Steps and saves whose longest is expected of the next."""


class Deadline:
    """When to save and stop. Written to by a checkpoint's writing thread as well."""

    def __init__(self, seconds: float | None, started: float) -> None:
        self._seconds, self._started = seconds, started
        self._steps: deque[float] = deque([0.0], RECENT)
        self._saves: deque[float] = deque([0.0], RECENT)
        self._step_began = time.monotonic()

    @property
    def reached(self) -> bool:
        """Whether another step and its save might not be over in time."""
        if self._seconds is None:
            return False
        return time.monotonic() - self._started + max(self._steps) + max(self._saves) >= self._seconds

    def step_begins(self) -> None:
        """What came before (loading, a save) does not count as the step's time."""
        self._step_began = time.monotonic()

    def step_ended(self) -> None:
        """A step is over, and with what comes after it the next begins."""
        self._steps.append(time.monotonic() - self._step_began)
        self.step_begins()

    def saved(self, seconds: float) -> None:
        """A save took so long, from being asked for to being committed."""
        self._saves.append(seconds)
