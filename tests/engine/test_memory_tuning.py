"""Freed memory: what stays with the process, and what loading gives back."""

from types import SimpleNamespace

import pytest
import torch

from nemotron_steps.config.schema.rl import RlConfig
from nemotron_steps.engine import memory_tuning
from nemotron_steps.engine.policy.megatron import MegatronPolicy
from tests.engine.policy.batches import rl_loss
from tests.models.checkpoints import write_checkpoint


@pytest.mark.cuda
def test_what_weights_were_loaded_into_is_left_to_the_vllm_beside_the_policy(tmp_path):
    write_checkpoint("qwen3", tmp_path, hidden_size=1024, intermediate_size=4096, num_hidden_layers=4)
    settings = {"precision": "bfloat16", "generation": {"backend": "vllm"}}
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()  # of this process's other tests
    policy = MegatronPolicy(RlConfig.model_validate({"policy": settings}).policy, tmp_path, rl_loss())
    weights = 2 * sum(parameter.numel() for parameter in policy.model.parameters())
    assert torch.cuda.memory_reserved() - torch.cuda.memory_allocated() - before < weights / 2


def test_glibc_is_told_to_keep_what_is_freed(monkeypatch):
    told = []
    library = SimpleNamespace(mallopt=lambda *values: told.append(values))
    monkeypatch.setattr(memory_tuning, "ctypes", SimpleNamespace(CDLL=lambda _: library))
    monkeypatch.setattr(memory_tuning, "platform", SimpleNamespace(libc_ver=lambda: ("glibc", "2.36")))
    memory_tuning.keep_freed_memory()
    assert told == [(-1, 2**30), (-3, 2**25)]  # malloc.h: M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
