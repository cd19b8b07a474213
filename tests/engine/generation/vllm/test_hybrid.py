"""A dense hybrid in a real vLLM engine, fed by a training policy: its logprobs are the policy's, and all of it travels.

One engine in this process, as on any CPU, for all tests but that of bfloat16.
"""

import pytest
import torch

from nemotron_steps.config.schema.policy import VllmConfig
from nemotron_steps.engine.policy.megatron import MegatronPolicy
from nemotron_steps.engine.types import TrainBatch
from nemotron_steps.models.huggingface import load_hf_weights, save_hf_checkpoint
from tests.engine.generation.vllm.conftest import sample
from tests.engine.policy.batches import grouped_batch, policy_config, rl_loss
from tests.models.hybrid_twins import write_hybrid

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

MAX_LENGTH = 96
BEGINNING = [20 + i * 7 % 150 for i in range(40)]
PROMPTS = [[5, 6, 7, 8], BEGINNING, [*BEGINNING, 9, 11], [*BEGINNING, 9, 12, 13, 14, 15, 16, 17], [40, 41]]
"""Shorter than the convolution's window, around the chunk of 8 positions, and with a beginning in common."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hybrid")
    write_hybrid("dense", folder, initializer_range=0.1, head_dim=32)  # vLLM on CPU has no smaller heads
    return folder


def policy_of(folder):
    return MegatronPolicy(policy_config(megatron_cfg={"optimizer": {"lr": 1e-3}}), folder, rl_loss())


def generator_of(folder, precision):
    from nemotron_steps.engine.generation.vllm.generator import VllmGenerator

    return VllmGenerator(
        folder,
        VllmConfig(enforce_eager=True, max_num_seqs=32),
        max_total_length=MAX_LENGTH,
        precision=precision,
        weights=policy_of(folder).weights(),
    )


@pytest.fixture(scope="module")
def generator(folder):
    generator = generator_of(folder, "float32")
    yield generator
    generator.close()


def token_mult_prob_error(policy, completions, prompts=PROMPTS):
    """mean exp|lp_gen - lp| over sampled tokens, by the policy's own logprobs."""
    ids, mask, recorded = (torch.zeros(len(completions), MAX_LENGTH) for _ in range(3))
    lengths = torch.zeros(len(completions), dtype=torch.int64)
    for row, done in enumerate(completions):
        prompt = prompts[int(done.request_id.split("/")[1])]
        answer = slice(len(prompt), len(prompt) + len(done.token_ids))
        ids[row, : answer.stop] = torch.tensor(prompt + done.token_ids)
        mask[row, answer], recorded[row, answer] = 1, torch.tensor(done.logprobs)
        lengths[row] = answer.stop
    batch = TrainBatch(ids.long(), lengths, mask, torch.ones(len(completions)), recorded, torch.zeros_like(mask))
    apart = (policy.logprobs(batch) - recorded).abs()[mask.bool()]
    assert apart.numel() == sum(len(done.token_ids) for done in completions) > 0
    return float(apart.exp().mean())


def test_convolutions_travel_in_bfloat16(folder, tmp_path):
    """vLLM on CPU packs them then. First in this file: this engine is gone when the others' starts."""
    generator = generator_of(folder, "bfloat16")
    try:
        assert token_mult_prob_error(policy_of(folder), sample(generator, PROMPTS, "start")) < 1.03
        weights = load_hf_weights(folder)
        for name, tensor in weights.items():
            if name.endswith("conv1d.weight"):
                tensor.add_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1)))
        save_hf_checkpoint(tmp_path / "changed", weights.items(), folder)
        after = policy_of(tmp_path / "changed")
        generator.update_weights(after.weights(), 1)
        assert token_mult_prob_error(after, sample(generator, PROMPTS, "changed")) < 1.03
    finally:
        generator.close()


def test_sampling_logprobs_are_the_policys_after_1_5_and_20_updates(generator, folder):
    policy = policy_of(folder)
    generator.update_weights(policy.weights(), 0)
    stale = sample(generator, PROMPTS, "v0")
    assert token_mult_prob_error(policy, stale) < 1.0001
    for version in range(1, 21):
        policy.train_step(grouped_batch(version))
        report = generator.update_weights(policy.weights(), version)
        assert report.bytes == sum(tensor.numel() * tensor.element_size() for _, tensor in policy.weights())
        if version in (1, 5, 20):
            completions = sample(generator, PROMPTS, f"v{version}")
            assert {v for c in completions for v in c.weight_versions} == {version}
            assert token_mult_prob_error(policy, completions) < 1.0001
    assert token_mult_prob_error(policy, stale) > 1.01


def test_time_steps_below_the_published_least_one_are_the_policys(generator, folder, tmp_path):
    """0.001 is what weights are drawn for, and no bound."""
    weights = load_hf_weights(folder)
    for name, tensor in weights.items():
        if name.endswith("dt_bias"):
            tensor.fill_(-9.0)
    save_hf_checkpoint(tmp_path / "trained", weights.items(), folder)
    policy = policy_of(tmp_path / "trained")
    generator.update_weights(policy.weights(), 29)
    assert token_mult_prob_error(policy, sample(generator, PROMPTS, "short steps")) < 1.0001
