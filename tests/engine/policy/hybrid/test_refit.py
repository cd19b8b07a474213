"""A generator that gets a training hybrid's weights samples with the policy's logprobs."""

from __future__ import annotations

import pytest
import torch

from nemotron_steps.engine.generation.embedded.generator import EmbeddedGenerator
from nemotron_steps.engine.policy.megatron import MegatronPolicy
from nemotron_steps.engine.types import GenerationRequest, SamplingParams, TrainBatch
from nemotron_steps.engine.weight_sync.plan import WeightPlan
from tests.engine.generation.embedded.test_generator import prompt_of, run
from tests.engine.policy.batches import grouped_batch, policy_config, rl_loss


def sent(weights):
    """Weights after a transfer: written into the buckets of a plan and read out of them, each in its own type."""
    plan = WeightPlan.of(weights())
    coming = weights()
    for bucket in plan.buckets:
        buffer = torch.zeros(bucket.bytes, dtype=torch.uint8)
        plan.fill(bucket, buffer, coming)
        yield from bucket.views(buffer)


def token_mult_prob_error(policy, generator, seed):
    """Mean of exp |logprob of the policy − logprob it was sampled with| over sampled tokens."""
    prompts = {f"p{number}": prompt_of(seed + number, 5 + 9 * number) for number in range(3)}
    requests = [GenerationRequest(name, ids, SamplingParams(12, seed=seed), 3) for name, ids in prompts.items()]
    rollouts = [(list(prompts[name]), done) for (name, _), done in run(generator, *requests).items()]
    ids, mask, sampled = (torch.zeros(len(rollouts), 40, dtype=dtype) for dtype in (torch.int64, *[torch.float32] * 2))
    lengths = []
    for row, (prompt, done) in enumerate(rollouts):
        end = len(prompt) + len(done.token_ids)
        ids[row, :end] = torch.tensor([*prompt, *done.token_ids])
        mask[row, len(prompt) : end] = 1
        sampled[row, len(prompt) : end] = torch.tensor(done.logprobs)
        lengths.append(end)
    batch = TrainBatch(ids, torch.tensor(lengths), mask, torch.ones(len(rollouts)), sampled, mask)
    return float((policy.logprobs(batch) - sampled).abs().exp()[mask > 0].mean())


@pytest.mark.parametrize(("name", "precision", "most"), [("latent", "float32", 1.0001), ("dense", "bfloat16", 1.05)])
def test_logprobs_agree_after_1_5_and_20_updates(name, precision, most, hybrid_folders):
    """With biases that move at the published rate."""
    config = policy_config(
        precision=precision, megatron_cfg={"moe_router_bias_update_rate": 1e-3, "optimizer": {"lr": 1e-3}}
    )
    policy = MegatronPolicy(config, hybrid_folders(name), rl_loss())
    dtype = getattr(torch, precision)
    generator = EmbeddedGenerator(
        policy.architecture, policy.weights(), max_sequences=9, max_total_length=64, eos_token_ids=[], dtype=dtype
    )
    for step in range(1, 21):
        before = token_mult_prob_error(policy, generator, step) if step == 20 else None
        policy.train_step(grouped_batch(step % 3))
        if step in (1, 5, 20):
            if before is not None:  # weights of 15 updates ago are told from new ones
                assert before > most
            generator.update_weights(sent(policy.weights), step)
            assert token_mult_prob_error(policy, generator, step) < most
