"""Which linears of a transformers model have an adapter is known before it is loaded."""

from __future__ import annotations

import pytest
import torch

from nemotron_steps.config.schema.dpo import DpoConfig
from nemotron_steps.errors import ConfigError
from nemotron_steps.models.adapters import lora_candidates
from nemotron_steps.models.architecture import Architecture
from nemotron_steps.steps.preflight import refuse_violations
from tests.models import hybrid_twins
from tests.models.checkpoints import write_checkpoint


@pytest.mark.parametrize("name", ["qwen3", "qwen2_tied", "qwen3_moe", "latent"])
def test_they_are_transformers_own(name, tmp_path):
    from transformers import AutoModelForCausalLM

    write = hybrid_twins.write_hybrid if name in hybrid_twins.TWINS else write_checkpoint
    write(name, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path).model
    linears = {f"model.{name}" for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    assert set(lora_candidates(Architecture.from_folder(tmp_path))) == linears


def test_what_the_dtensor_policy_would_refuse_is_refused_when_planned(tmp_path):
    hybrid_twins.write_hybrid("dense", tmp_path)

    def refused(**lora):
        dtensor = {"enabled": True, "lora_cfg": {"enabled": True, **lora}}
        policy = {"checkpoint": str(tmp_path), "dtensor_cfg": dtensor, "train_global_batch_size": 8}
        policy["max_total_sequence_length"] = 64
        refuse_violations(DpoConfig.model_validate({"policy": policy}), {})

    with pytest.raises(ConfigError, match="in_proj cannot have an adapter") as caught:
        refused()
    names = caught.value.hints[0].rpartition("=")[2].strip("[]").split(",")
    refused(match_all_linear=False, target_modules=names)
    with pytest.raises(ConfigError, match="no linear layer 'linear_qkv'"):
        refused(match_all_linear=False, target_modules=["linear_qkv"])
