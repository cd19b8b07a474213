"""Weights between GPU processes: CUDA IPC on one GPU, NCCL between two, equal to the last bit."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.ray, pytest.mark.cuda]


def test_cuda_ipc_and_nccl_carry_the_weights_bit_for_bit():
    # A process of its own: the other tests' Ray has no GPUs.
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.weight_sync.transfers"],
        cwd=Path(__file__).parents[3],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=280,
    )
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [one["transports"] for one in found] == [[["cuda_ipc", 0]], [["nccl", 0]]][: min(2, GPUS)]
    assert all(one["equal"] and one["devices"] == ["cuda"] and one["bytes"] > 8e8 for one in found)
