"""On GPUs: generators of every layout follow the policy, and supervised ranks equal one process."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.engine.placement.gpu_runs import NEEDED_GPUS, STEPS

pytestmark = [
    pytest.mark.ray,
    pytest.mark.timeout(400),
    pytest.mark.cuda,
]


def result_of(case: str) -> dict:
    needed = NEEDED_GPUS.get(case, 2)
    if torch.cuda.device_count() < needed:
        pytest.skip(f"needs {needed} CUDA devices")
    command = [sys.executable, "-m", "tests.engine.placement.gpu_runs", case]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[3], stdout=subprocess.PIPE, text=True, check=True, timeout=390
    )
    (found,) = json.loads(done.stdout.splitlines()[-1]).values()
    return found


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("case", "transports"),
    [
        ("tensor parallel", ["cuda_ipc", "cuda_ipc"]),
        ("tensor parallel, apart", ["nccl", "nccl"]),
        ("experts", ["cuda_ipc", "cuda_ipc"]),
        ("asynchronous", ["nccl"]),
    ],
)
def test_a_generator_on_several_gpus_follows_the_policy(case: str, transports: list[str]) -> None:
    found = result_of(case)
    assert found["transports"] == transports
    if case == "asynchronous":
        assert found["policy_lag"] == 1
        assert found["token_mult_prob_error"][0] < 1.05  # later steps train on samples of older weights
    else:
        assert max(found["token_mult_prob_error"]) < 1.05  # bfloat16; under older weights it is about 1.2


@pytest.mark.vllm
@pytest.mark.parametrize("case", ["adapters", "hybrid", "replayed experts"])
def test_a_generator_that_sleeps_beside_the_policy_follows_it(case: str) -> None:
    found = result_of(case)
    assert max(found["token_mult_prob_error"]) < 1.05
    if case == "replayed experts":
        assert found["router_replay_share"] == [1.0] * STEPS


def test_supervised_ranks_on_gpus_equal_one_process() -> None:
    losses = result_of("supervised")
    for layout in ("data", "tensor"):
        assert losses[layout] == pytest.approx(losses["process"], rel=1e-4)
