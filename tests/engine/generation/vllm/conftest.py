"""A tiny Qwen3 and engines of it, and what samples of them are compared with."""

import math

import pytest
import torch

from nemotron_steps.config.schema.policy import VllmConfig
from nemotron_steps.engine.types import GenerationRequest, SamplingParams

EOS = 3
MAX_LENGTH = 64
BLOCK = 32
"""Tokens of a block, which is what vLLM caches: on CPU it would take 128, and no prompt here would fill one."""
PROMPTS = [[5, 6, 7, 8] * 3, [9, 10, 11], [40 + i for i in range(17)]]
SIZES = {
    "vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32, "max_position_embeddings": MAX_LENGTH, "tie_word_embeddings": True, "eos_token_id": EOS,
}  # fmt: skip


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """Folder and network."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(intermediate_size=128, **SIZES))
    folder = tmp_path_factory.mktemp("qwen3")
    model.save_pretrained(folder)
    return folder, model


def started(folder, weights, *, options=None, **settings):
    """An engine whose weights come as in training: the folder's own are not read."""
    from nemotron_steps.engine.generation.vllm.generator import VllmGenerator

    config = VllmConfig(enforce_eager=True, max_num_seqs=32, **settings)
    return VllmGenerator(
        folder, config, max_total_length=MAX_LENGTH, precision="float32", weights=weights, options=options
    )


def sample(generator, prompts, tag, n=4, **params):
    for number, prompt in enumerate(prompts):
        settings = SamplingParams(**{"max_new_tokens": 12, "stop_token_ids": (EOS,), **params})
        generator.submit(GenerationRequest(f"{tag}/{number}", prompt, settings, n))
    return finish(generator)


def finish(generator):
    done = []
    while generator.pending():
        done += generator.step()
    return done


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
