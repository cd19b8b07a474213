"""The experts that a generator chose, as they come with its completions."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from nemotron_steps.engine.batching import pad_rows
from nemotron_steps.engine.generation.embedded.generator import EmbeddedGenerator
from nemotron_steps.engine.policy.megatron import MegatronPolicy
from nemotron_steps.engine.types import Completion, GenerationRequest, Rollout, SamplingParams
from nemotron_steps.models.architecture import Architecture
from nemotron_steps.models.huggingface import load_hf_weights
from tests.engine.generation.embedded.test_generator import drain, prompt_of
from tests.engine.policy.batches import policy_config, rl_loss
from tests.engine.policy.routes import chosen_by
from tests.models.hybrid_twins import write_hybrid

BLOCKS = 3 * 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("routed") / "latent"
    write_hybrid("latent", folder, initializer_range=0.1)
    return folder


def weights_of(folder, *, biased):
    """Biases choose experts and never weigh them: with others, it is a generator that chooses others."""
    generator = torch.Generator().manual_seed(5)
    for name, tensor in load_hf_weights(folder).items():
        if biased and name.endswith("e_score_correction_bias"):
            tensor = tensor + 0.3 * torch.randn(tensor.shape, generator=generator)
        yield name, tensor


def make(folder, *, biased=False, record=True, rows=6):
    return EmbeddedGenerator(
        Architecture.from_folder(folder),
        weights_of(folder, biased=biased),
        max_sequences=rows,
        max_total_length=120,
        eos_token_ids=[],
        record_routed_experts=record,
    )


def request(name, prompt, n=3, new=20):
    return GenerationRequest(name, prompt, SamplingParams(max_new_tokens=new, seed=3), n)


def requests():
    """Groups of one prompt, prompts that begin alike, rows that join late and leave at different times."""
    begin = prompt_of(0, BLOCKS)
    tails = [begin + prompt_of(seed, 5 + seed) for seed in range(1, 6)]
    return [
        request("group", prompt_of(9, 21), n=4),
        *(request(f"tail {number}", tail, n=1, new=9 + number) for number, tail in enumerate(tails)),
        request("one token", prompt_of(8, 4), n=1, new=1),
    ]


def rollout_of(completion: Completion, prompts) -> Rollout:
    prompt, sampled = prompts[completion.request_id], completion.token_ids
    return Rollout(
        group_id=completion.request_id,
        index=completion.index,
        token_ids=[*prompt, *sampled],
        token_mask=[0] * len(prompt) + [1] * len(sampled),
        logprobs=[0.0] * len(prompt) + completion.logprobs,
        weight_versions=completion.weight_versions,
        reward=0.0,
        environment="",
        truncated=False,
        routed_experts=completion.routed_experts,
    )


def sampled_batch(generator):
    asked = requests()
    for each in asked:
        generator.submit(each)
    completions = drain(generator).values()
    prompts = {each.request_id: list(each.prompt_ids) for each in asked}
    rollouts = [rollout_of(each, prompts) for each in completions]
    assert all(len(r.routed_experts) == len(r.token_ids) - 1 for r in rollouts)
    return pad_rows(rollouts, torch.ones(len(rollouts)))


def test_a_policy_that_replays_has_the_generators_logprobs(folder):
    """Whose experts were others: 14 requests over 6 rows, with prefixes that are shared and reused."""
    batch = sampled_batch(make(folder, biased=True))
    policy = MegatronPolicy(policy_config(), folder, rl_loss())
    own = policy.logprobs(replace(batch, routed_experts=None))
    assert float((own - batch.generation_logprobs).abs().max()) > 0.05
    torch.testing.assert_close(policy.logprobs(batch), batch.generation_logprobs, atol=5e-5, rtol=0)


def test_after_an_update_in_flight_each_token_has_the_experts_it_went_through(folder):
    """Half under one set of biases, half under another; the prompt is not asked again."""
    generator = make(folder)
    generator.submit(request("r", prompt_of(4, 12), n=2, new=16))
    for _ in range(8):
        generator.step()
    generator.update_weights(weights_of(folder, biased=True), 1)
    rollouts = [rollout_of(each, {"r": prompt_of(4, 12)}) for each in drain(generator).values()]
    batch = pad_rows(rollouts, torch.ones(2))
    assert {0, 1} == set(rollouts[0].weight_versions)
    policy = MegatronPolicy(policy_config(), folder, rl_loss())
    torch.testing.assert_close(policy.logprobs(batch), batch.generation_logprobs, atol=5e-5, rtol=0)
    unchanged = chosen_by(policy, batch).sort(-1).values == batch.routed_experts.sort(-1).values
    before = 12 + rollouts[0].weight_versions.count(0) - 1
    assert bool(unchanged[:, :before].all()) and not bool(unchanged[:, before:].all())


def test_decoding_without_the_host_records_the_same(tmp_path):
    """CUDA's way, operator by operator, of a model whose attention needs no kernel since it has none."""
    pytest.importorskip("triton")
    from nemotron_steps.engine.generation.embedded.decoders import GraphDecoder

    write_hybrid("mixture", tmp_path / "m", pattern="MEM-E", initializer_range=0.1, use_cache=False)
    found = []
    for fused in (False, True):
        generator = make(tmp_path / "m", rows=3)
        if fused:
            generator._decoder = GraphDecoder(generator._model, generator._batch, capture=False)
        for each in requests():
            generator.submit(each)
        found.append(drain(generator))
    for key, completion in found[0].items():
        assert found[1][key].token_ids == completion.token_ids
        assert np.array_equal(np.sort(found[1][key].routed_experts), np.sort(completion.routed_experts))
