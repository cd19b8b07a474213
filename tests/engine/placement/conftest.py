"""A second node for the Ray cluster of the tests, and runs of its tiny checkpoint."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nemotron_steps.engine.placement.run import build_run
from nemotron_steps.engine.rollouts.data import read_rows
from nemotron_steps.engine.setup.rows import RunRows
from nemotron_steps.runs.context import Tracker
from tests.engine.grpo import grpo_runs


@pytest.fixture
def second_node(cluster, request, tmp_path):
    """Another Ray node of two CPUs joins, as one would by hand on another machine; gives the cluster's address.

    A parameter is how many GPUs the node says it has: nothing looks for them on a machine without CUDA.
    """
    import ray

    address = ray.get_runtime_context().gcs_address
    command = [str(Path(sys.executable).with_name("ray")), "start", f"--address={address}", "--num-cpus=2", "--block"]
    command += [f"--num-gpus={getattr(request, 'param', 0)}", "--disable-usage-stats"]
    said = tmp_path / "second_node.txt"

    # Ray takes no GPUs that are hidden, and tests/conftest.py hides them.
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    with said.open("w") as file:
        node = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment)
    deadline = time.monotonic() + 60
    while len([n for n in ray.nodes() if n["Alive"]]) < 2:
        assert node.poll() is None and time.monotonic() < deadline, f"no second node joined: {said.read_text()}"
        time.sleep(0.1)
    yield address
    node.terminate()
    node.wait(30)


def config_of(checkpoint, steps, **changes):
    """Four groups of four a step, without checkpoints; `a__b=value` changes one key."""
    smaller = {
        "grpo__num_generations_per_prompt": 4,
        "policy__train_micro_batch_size": 4,
        "policy__logprob_batch_size": 16,
        "policy__generation__max_sequences": 16,
        "checkpointing": {"enabled": False},
    }
    return grpo_runs.config_of(checkpoint, steps, **{**smaller, **changes})


def start(config, work, records=None):
    """A run's parts; `records` receives what it reports."""
    listener = None if records is None else records.append
    rows = RunRows(read_rows(config.data.train.data_path))
    return build_run(config, rows, work=work, started=time.monotonic(), reporter=Tracker("test", None, listener))
