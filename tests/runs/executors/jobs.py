"""What tests of executors share: runs of the toy chain as jobs."""

import time
from collections.abc import Callable
from pathlib import Path

import nemotron_steps
from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.config.profiles import Profile
from nemotron_steps.runs import launch as launching
from nemotron_steps.runs.run_folder import RunFolder, RunInfo, new_run_id

ROOT = Path(nemotron_steps.__file__).parents[1]
HERE = Path(__file__).parents[1]
"""Where the toy chain is."""


def wait_until(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)


def submit(store: ArtifactStore, profile: Profile, *overrides: str, run_id: str | None = None) -> RunInfo:
    if run_id is None:
        run_id = new_run_id("toy")
        RunFolder(store, run_id).create("toy", {"targets": ["toy/train"], "overrides": list(overrides)})
    return launching.submit(store, profile, run_id=run_id)
