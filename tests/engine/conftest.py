"""A checkpoint with prompts for GRPO runs, and their environments."""

from __future__ import annotations

import pytest

from nemotron_steps.environments import registry
from tests.benchmarks.grpo_task import make_checkpoint, prompts, write_rows
from tests.engine.grpo.grpo_runs import ENVIRONMENTS


@pytest.fixture(scope="session")
def task(tmp_path_factory):
    """A Hugging Face folder with train.jsonl beside it."""
    folder = tmp_path_factory.mktemp("grpo_task")
    make_checkpoint(folder)
    write_rows(folder / "train.jsonl", prompts(128))
    return folder


@pytest.fixture(autouse=True)
def environments(monkeypatch):
    for environment in ENVIRONMENTS:
        monkeypatch.setitem(registry.BUILT_IN, environment.name, f"{environment.__module__}:{environment.__name__}")
