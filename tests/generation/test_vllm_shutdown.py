"""A vLLM engine comes and goes; the policy of the same process does not notice."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from nemotron_steps.config.schema.policy import VllmConfig
from nemotron_steps.engine.policy.megatron import MegatronPolicy
from nemotron_steps.engine.types import GenerationRequest, SamplingParams
from tests.models.checkpoints import write_checkpoint
from tests.policy.batches import grouped_batch, policy_config, rl_loss

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_policy_trains_on_after_its_generator_was_closed(tmp_path):
    from nemotron_steps.engine.generation.vllm import VllmGenerator

    write_checkpoint("qwen3", tmp_path / "qwen3", head_dim=32)
    batches = [grouped_batch(seed) for seed in range(2)]
    alone = MegatronPolicy(policy_config(), tmp_path / "qwen3", rl_loss())
    expected = [alone.train_step(batch) for batch in batches]
    policy = MegatronPolicy(policy_config(), tmp_path / "qwen3", rl_loss())
    world = dist.group.WORLD
    generator = VllmGenerator(
        tmp_path / "qwen3",
        VllmConfig(enforce_eager=True, max_num_seqs=8),
        max_total_length=32,
        precision="float32",
        weights=policy.weights(),
    )
    generator.submit(GenerationRequest("r", [5, 6, 7], SamplingParams(max_new_tokens=4), 2))
    while generator.pending():
        generator.step()
    assert policy.train_step(batches[0]) == expected[0]
    generator.close()
    assert dist.group.WORLD is world
    assert policy.train_step(batches[1]) == expected[1]
    policy.save_checkpoint(str(tmp_path / "step"))
    fresh = MegatronPolicy(policy_config(), tmp_path / "qwen3", rl_loss())
    fresh.load_checkpoint(str(tmp_path / "step"))
    assert fresh.train_step(batches[0]) == policy.train_step(batches[0])
