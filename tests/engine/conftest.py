"""A checkpoint with prompts for GRPO runs, their environments, and one Ray cluster for all tests that need one."""

from unittest import mock

import pytest

from benchmarks.grpo_task import make_checkpoint, prompts, write_rows
from nemotron_steps.config.schema.rl import ClusterConfig
from nemotron_steps.environments import registry
from tests.engine.grpo.grpo_environments import ENVIRONMENTS


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


@pytest.fixture(scope="session")
def cluster():
    from nemotron_steps.engine.placement.cluster import RayCluster

    with mock.patch("os.cpu_count", return_value=2):  # what `second_node` counts on
        cluster = RayCluster(ClusterConfig(backend="ray"))
    yield cluster
    cluster.close()


@pytest.fixture(scope="session")
def checkpoint(task):
    return task
