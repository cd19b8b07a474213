"""A real vLLM engine on this machine: parity with a full forward pass through many weight updates."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist

from nemotron_steps.config.schema.policy import VllmConfig
from nemotron_steps.engine.types import FinishReason, GenerationRequest, SamplingParams
from tests.models.hybrid_twins import write_hybrid

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

EOS = 3
MAX_LENGTH = 64
BLOCK = 32
"""Tokens of a block, which is what vLLM caches: on CPU it would take 128, and no prompt here would fill one."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=True,
        eos_token_id=EOS,
    )
    model = Qwen3ForCausalLM(config)
    folder = tmp_path_factory.mktemp("qwen3")
    model.save_pretrained(folder)
    return folder, model


@pytest.fixture(scope="module")
def generator(model):
    from nemotron_steps.engine.generation.vllm.generator import VllmGenerator

    folder, network = model
    # Weights by reference, as in training: the folder's own are not read.
    generator = VllmGenerator(
        folder,
        VllmConfig(enforce_eager=True, max_num_seqs=32),
        max_total_length=MAX_LENGTH,
        precision="float32",
        weights=network.state_dict().items(),
        options={"block_size": BLOCK},
    )
    yield generator
    generator.close()


def test_heads_without_a_cpu_kernel_are_refused_before_vllm_compiles(tmp_path):
    from vllm.platforms import current_platform

    from nemotron_steps.engine.generation.vllm.generator import VllmGenerator
    from nemotron_steps.errors import UnsupportedError

    if not current_platform.is_cpu():
        pytest.skip("a limit of vLLM's CPU kernels")
    (tmp_path / "config.json").write_text('{"hidden_size": 64, "num_attention_heads": 4}')
    with pytest.raises(UnsupportedError, match="no attention kernel") as caught:
        VllmGenerator(tmp_path, VllmConfig(), max_total_length=MAX_LENGTH, precision="float32")
    assert caught.value.found == "head_dim 16"


def test_experts_without_a_cpu_kernel_are_refused_before_vllm_compiles(tmp_path):
    from vllm.platforms import current_platform

    from nemotron_steps.engine.generation.vllm.generator import VllmGenerator
    from nemotron_steps.errors import UnsupportedError

    if not current_platform.is_cpu():
        pytest.skip("a limit of vLLM's CPU kernels")
    write_hybrid("latent", tmp_path, head_dim=32)
    with pytest.raises(UnsupportedError, match="experts without a gate") as caught:
        VllmGenerator(tmp_path, VllmConfig(), max_total_length=MAX_LENGTH, precision="float32")
    assert caught.value.hints == ("policy.generation.backend=embedded",)


def sample(generator, prompts, tag, n=4, **params):
    for number, prompt in enumerate(prompts):
        settings = SamplingParams(**{"max_new_tokens": 12, "stop_token_ids": (EOS,), **params})
        generator.submit(GenerationRequest(f"{tag}/{number}", prompt, settings, n))
    done = []
    while generator.pending():
        done += generator.step()
    return done


def test_seeded_samples_depend_on_nothing_but_their_seed(generator):
    prompts = [[5, 9, 17, 30], [8, 8, 41], [77, 12, 5, 6, 9]]

    def tokens(completions):
        return {(c.request_id, c.index): c.token_ids for c in completions}

    first = tokens(sample(generator, prompts, "seeded", seed=7))
    sample(generator, prompts[::-1], "between", n=2)
    assert tokens(sample(generator, prompts[:1], "seeded", seed=7)).items() <= first.items()  # in another batch
    assert len({tuple(ids) for ids in first.values()}) > 9
    assert tokens(sample(generator, prompts, "seeded", seed=8)) != first


def shift(network, size):
    """Other weights, as after a training step."""
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn_like(parameter) * size)


def token_mult_prob_error(network, prompts, completions, temperature=1.0):
    """mean exp|lp_gen - lp| over sampled tokens: the contract's measure of drift."""
    errors = []
    for completion in completions:
        prompt = prompts[int(completion.request_id.split("/")[1])]
        with torch.no_grad():
            logits = network(torch.tensor([prompt + completion.token_ids])).logits[0]
        logprobs = torch.log_softmax(logits / temperature, -1)
        for offset, (token, recorded) in enumerate(zip(completion.token_ids, completion.logprobs, strict=True)):
            errors.append(math.exp(abs(float(logprobs[len(prompt) + offset - 1, token]) - recorded)))
    return sum(errors) / len(errors)


PROMPTS = [[5, 6, 7, 8] * 3, [9, 10, 11], [40 + i for i in range(17)]]


def test_sampling_logprobs_equal_the_policys_after_1_5_and_20_weight_updates(generator, model):
    _, network = model
    assert token_mult_prob_error(network, PROMPTS, sample(generator, PROMPTS, "v0")) < 1.0001
    for version in range(1, 21):
        shift(network, 0.02)
        report = generator.update_weights(network.state_dict().items(), version)
        assert report.bytes > 0
        if version in (1, 5, 20):
            completions = sample(generator, PROMPTS, f"v{version}")
            assert {v for c in completions for v in c.weight_versions} == {version}
            assert token_mult_prob_error(network, PROMPTS, completions) < 1.0001


def test_a_prefix_cached_under_older_weights_is_not_read_while_other_requests_run(generator, model):
    """vLLM resets its prefix cache only when nothing runs: in asynchronous training, never."""
    _, network = model
    long_prompt = [[20 + i % 50 for i in range(BLOCK + 16)]]
    sample(generator, long_prompt, "cached")
    generator.submit(GenerationRequest("running", PROMPTS[2], SamplingParams(max_new_tokens=40), 1))
    for _ in range(3):
        generator.step()
    shift(network, 0.05)
    generator.update_weights(network.state_dict().items(), 150)
    fresh = [c for c in sample(generator, long_prompt, "fresh") if c.request_id.startswith("fresh")]
    assert fresh and token_mult_prob_error(network, long_prompt, fresh) < 1.0001


def test_recorded_logprobs_are_those_of_the_temperature(generator, model):
    _, network = model
    for temperature in (0.5, 1.7):
        done = sample(generator, PROMPTS, f"at {temperature}", temperature=temperature)
        assert token_mult_prob_error(network, PROMPTS, done, temperature) < 1.0001
        assert token_mult_prob_error(network, PROMPTS, done) > 1.01


def test_recomputed_keys_and_values_make_later_tokens_those_of_the_new_weights_alone(generator, model, monkeypatch):
    _, network = model
    monkeypatch.setattr(generator, "_recompute", True)
    generator.update_weights(network.state_dict().items(), 210)
    generator.submit(GenerationRequest("redone", PROMPTS[0], SamplingParams(max_new_tokens=12), 3))
    for _ in range(5):
        generator.step()
    shift(network, 0.05)
    generator.update_weights(network.state_dict().items(), 211)
    done = []
    while generator.pending():
        done += generator.step()
    new = 0
    for completion in done:
        with torch.no_grad():
            logits = network(torch.tensor([PROMPTS[0] + completion.token_ids])).logits[0]
        expected = torch.log_softmax(logits, -1)
        for offset, (token, version) in enumerate(zip(completion.token_ids, completion.weight_versions, strict=True)):
            if version == 211:
                new += 1
                found = float(expected[len(PROMPTS[0]) + offset - 1, token])
                assert completion.logprobs[offset] == pytest.approx(found, abs=1e-4)
    assert new > 6


def test_stop_length_and_cancel(generator):
    done = sample(generator, PROMPTS[:1], "length", n=2, max_new_tokens=3, stop_token_ids=())
    assert {c.finish_reason for c in done} <= {FinishReason.LENGTH, FinishReason.STOP}
    assert all(len(c.token_ids) <= 3 for c in done)
    generator.submit(GenerationRequest("gone", PROMPTS[0], SamplingParams(max_new_tokens=40), 3))
    generator.step()
    generator.cancel("gone")
    assert generator.pending() == 0


def test_any_end_of_a_turn_ends_an_answer_as_the_embedded_generator_does(generator, model):
    """Also one that neither config.json nor a tokenizer names."""
    from nemotron_steps.engine.generation.embedded.generator import EmbeddedGenerator
    from nemotron_steps.models.architecture import Architecture

    folder, network = model
    weights = network.state_dict()
    generator.update_weights(weights.items(), 250)
    (whole,) = sample(generator, PROMPTS[:1], "whole", n=1, temperature=0.0)
    ends = tuple(dict.fromkeys((EOS, whole.token_ids[3])))
    embedded = EmbeddedGenerator(
        Architecture.from_folder(folder), weights.items(), max_sequences=4, max_total_length=MAX_LENGTH,
        eos_token_ids=ends,
    )  # fmt: skip
    ended = [
        sample(each, PROMPTS[:1], "ended", n=1, temperature=0.0, stop_token_ids=ends)[0]
        for each in (generator, embedded)
    ]
    first = whole.token_ids.index(whole.token_ids[3]) + 1
    assert [done.token_ids for done in ended] == [whole.token_ids[:first]] * 2
    assert {done.finish_reason for done in ended} == {FinishReason.STOP}


def test_greedy_equals_transformers(generator, model):
    _, network = model
    (done,) = sample(generator, PROMPTS[:1], "greedy", n=1, temperature=0.0)
    with torch.no_grad():
        expected = network.generate(
            torch.tensor(PROMPTS[:1]), max_new_tokens=12, do_sample=False, eos_token_id=EOS, pad_token_id=0
        )
    assert done.token_ids == expected[0, len(PROMPTS[0]) :].tolist()


def test_closing_it_leaves_the_process_groups_to_the_policies(generator, tmp_path):
    """Last in this file: nothing can be sampled afterwards."""
    from nemotron_steps.engine.policy.megatron import MegatronPolicy
    from tests.engine.policy.batches import grouped_batch, policy_config, rl_loss
    from tests.models.checkpoints import write_checkpoint

    write_checkpoint("qwen3", tmp_path / "qwen3")
    world = dist.group.WORLD
    policy, other = (MegatronPolicy(policy_config(), tmp_path / "qwen3", rl_loss()) for _ in range(2))
    assert policy.train_step(grouped_batch(0)) == other.train_step(grouped_batch(0))
    generator.close()
    assert dist.group.WORLD is world
    policy.save_checkpoint(str(tmp_path / "step"))
    fresh = MegatronPolicy(policy_config(), tmp_path / "qwen3", rl_loss())
    fresh.load_checkpoint(str(tmp_path / "step"))
    assert fresh.train_step(grouped_batch(1)) == policy.train_step(grouped_batch(1))
    generator.close()  # closed already: nothing happens
