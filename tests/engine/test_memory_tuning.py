"""Freed memory stays with the process, as far as its user lets it; what the collector need not look at."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest
import torch

from nemotron_steps.config.schema.rl import RlConfig
from nemotron_steps.engine import memory_tuning as malloc_tuning
from nemotron_steps.engine.policy.megatron import MegatronPolicy
from tests.engine.policy.batches import rl_loss
from tests.models.checkpoints import write_checkpoint

PROGRAM = """
import resource, sys
import numpy as np
from nemotron_steps.engine.memory_tuning import keep_freed_memory

if sys.argv[1] == "kept":
    keep_freed_memory()

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    arrays = [np.ones(2**19) for _ in range(8)]  # 4 MiB each
    del arrays
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults()
print(sum(faults() for _ in range(3)))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="this host's C library frees as it likes")
def test_what_is_freed_is_there_again():
    """In a process of its own, since allocators have a past."""
    faults = {
        how: int(subprocess.run([sys.executable, "-c", PROGRAM, how], capture_output=True, check=True).stdout)
        for how in ("kept", "given_back")
    }
    assert faults["kept"] < faults["given_back"] / 10


@pytest.mark.parametrize("said", [None, "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_a_gpus_memory_is_shared_by_phases_unless_the_user_says_how_it_is_kept(said, monkeypatch):
    told, given_back = [], []
    monkeypatch.setattr(malloc_tuning._Phases, "share", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: given_back.append(1))
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", told.append)
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    if said is not None:
        monkeypatch.setenv(said, "max_split_size_mb:64")
    malloc_tuning.release_gpu_memory()
    assert given_back == [1]
    malloc_tuning.share_gpu_memory()
    malloc_tuning.release_gpu_memory()
    assert told == (["expandable_segments:True"] if said is None else [])
    assert given_back == ([1] if said is None else [1, 1])


@pytest.mark.cuda
def test_what_weights_were_loaded_into_is_left_to_the_vllm_beside_the_policy(tmp_path):
    write_checkpoint("qwen3", tmp_path, hidden_size=1024, intermediate_size=4096, num_hidden_layers=4)
    settings = {"precision": "bfloat16", "generation": {"backend": "vllm"}}
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()  # of this process's other tests
    policy = MegatronPolicy(RlConfig.model_validate({"policy": settings}).policy, tmp_path, rl_loss())
    weights = 2 * sum(parameter.numel() for parameter in policy.model.parameters())
    assert torch.cuda.memory_reserved() - torch.cuda.memory_allocated() - before < weights / 2
