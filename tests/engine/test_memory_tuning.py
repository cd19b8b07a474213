"""Memory that loading has freed is given back."""

from __future__ import annotations

import pytest
import torch

from nemotron_steps.config.schema.rl import RlConfig
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
