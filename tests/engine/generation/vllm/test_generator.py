"""A real vLLM engine on this machine: parity with a full forward pass through many weight updates."""

import pytest
import torch
import torch.distributed as dist

from nemotron_steps.engine.types import FinishReason, GenerationRequest, SamplingParams
from nemotron_steps.errors import UnsupportedError
from tests.engine.generation.vllm.conftest import (
    BLOCK,
    EOS,
    MAX_LENGTH,
    PROMPTS,
    finish,
    sample,
    shift,
    started,
    token_mult_prob_error,
)
from tests.models.hybrid_twins import write_hybrid

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def generator(model):
    generator = started(model[0], model[1].state_dict().items(), options={"block_size": BLOCK})
    yield generator
    generator.close()


def test_what_has_no_cpu_kernel_is_refused_before_vllm_compiles(tmp_path):
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        pytest.skip("needs CUDA: a limit of vLLM's CPU kernels")
    write_hybrid("latent", tmp_path, head_dim=32)
    with pytest.raises(UnsupportedError, match="without a gate") as caught:
        started(tmp_path, None)
    assert caught.value.hints[0] == "policy.generation.backend=embedded"


def test_seeded_samples_depend_on_nothing_but_their_seed(generator):
    prompts = [[5, 9, 17, 30], [8, 8, 41], [77, 12, 5, 6, 9]]

    def tokens(completions):
        return {(c.request_id, c.index): c.token_ids for c in completions}

    first = tokens(sample(generator, prompts, "seeded", seed=7))
    sample(generator, prompts[::-1], "between", n=2)
    assert tokens(sample(generator, prompts[:1], "seeded", seed=7)).items() <= first.items()  # in another batch
    assert len({tuple(ids) for ids in first.values()}) > 9
    assert tokens(sample(generator, prompts, "seeded", seed=8)) != first


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
    done = finish(generator)
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
