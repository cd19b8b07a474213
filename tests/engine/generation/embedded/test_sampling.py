"""Sampling: distribution, truncation, mixed batches and random streams."""

import math

import pytest
import torch

from nemotron_steps.engine.generation.embedded.sampling import make_plan, sample, stream_key, stream_uniforms
from nemotron_steps.engine.types import SamplingParams

CPU = torch.device("cpu")
KEYS = [8121863710818700027, 5286896768329049506, -6791461165213991253, -7275564243568204253]
"""Of the streams (1, a, 0), (1, a, 1), (2, a, 0) and (1, b, 0), as seed, request and index."""


def draw(logits: torch.Tensor, params: SamplingParams, count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    uniforms = stream_uniforms(torch.tensor([stream_key(seed, "test", 0)]), torch.tensor([0]), count).squeeze(0)
    plan = make_plan([params] * count, logits.numel(), CPU)
    return sample(logits.repeat(count, 1), uniforms, plan)


def chi_square(observed: torch.Tensor, probabilities: torch.Tensor) -> float:
    expected = probabilities * observed.sum()
    assert expected.min() >= 5
    return float(((observed - expected) ** 2 / expected).sum())


@pytest.mark.parametrize(("vocab", "temperature"), [(8, 1.0), (64, 0.6), (101, 1.0), (512, 1.5)])
def test_frequencies_follow_the_distribution(vocab: int, temperature: float) -> None:
    logits = 0.5 * torch.randn(vocab, generator=torch.Generator().manual_seed(vocab))
    count = 100 * vocab
    tokens, logprobs = draw(logits, SamplingParams(1, temperature=temperature), count)
    expected = (logits / temperature).log_softmax(-1)
    observed = torch.bincount(tokens, minlength=vocab).float()
    degrees = vocab - 1
    # Five standard deviations of the statistic: a wrong sampler is off by far more at this many draws.
    assert chi_square(observed, expected.exp()) < degrees + 5 * math.sqrt(2 * degrees)
    torch.testing.assert_close(logprobs, expected[tokens], atol=2e-6, rtol=0)


def test_top_k_and_top_p_keep_the_right_tokens_and_renormalise() -> None:
    probabilities = torch.tensor([0.05, 0.4, 0.1, 0.25, 0.2])
    for params, kept in (
        (SamplingParams(1, top_k=2), [1, 3]),
        (SamplingParams(1, top_p=0.6), [1, 3]),
        (SamplingParams(1, top_p=0.66), [1, 3, 4]),
        (SamplingParams(1, top_k=3, top_p=0.7), [1, 3]),
        (SamplingParams(1, top_p=1e-9), [1]),
        (SamplingParams(1, top_k=99), [0, 1, 2, 3, 4]),
    ):
        tokens, logprobs = draw(probabilities.log(), params, 20_000)
        observed = torch.bincount(tokens, minlength=5).float()
        assert observed.nonzero().flatten().tolist() == kept
        if len(kept) > 1:
            share = probabilities[kept] / probabilities[kept].sum()
            assert chi_square(observed[kept], share) < len(kept) - 1 + 5 * math.sqrt(2 * (len(kept) - 1))
        share = torch.zeros(5).index_copy_(0, torch.tensor(kept), probabilities[kept] / probabilities[kept].sum())
        torch.testing.assert_close(logprobs, share.log()[tokens], atol=2e-6, rtol=0)


def test_rows_of_a_mixed_batch_sample_as_in_a_uniform_one() -> None:
    params = [
        SamplingParams(1, temperature=0.0),
        SamplingParams(1),
        SamplingParams(1, temperature=0.5, top_k=3),
        SamplingParams(1, temperature=2.0, top_p=0.5),
        SamplingParams(1, temperature=0.0, top_k=2),
    ]
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(0))
    uniforms = torch.tensor([0.9, 0.1, 0.7, 0.3, 0.99], dtype=torch.float64)
    tokens, logprobs = sample(logits.clone(), uniforms, make_plan(params, 40, CPU))
    for i, p in enumerate(params):
        token, logprob = sample(logits[i : i + 1].clone(), uniforms[i : i + 1], make_plan([p], 40, CPU))
        assert token.item() == tokens[i].item()
        torch.testing.assert_close(logprob, logprobs[i : i + 1])


def splitmix(key: int, count: int) -> list[float]:
    """SplitMix64 as it was published, on Python's whole numbers."""
    found, whole = [], 2**64 - 1
    for step in range(1, count + 1):
        x = (key + step * 0x9E3779B97F4A7C15) & whole
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & whole
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & whole
        found.append(((x ^ (x >> 31)) >> 11) * 2.0**-53)
    return found


def test_streams_are_the_published_generators_and_keys_do_not_change_between_releases() -> None:
    keys = [stream_key(1, "a", 0), stream_key(1, "a", 1), stream_key(2, "a", 0), stream_key(1, "b", 0), 0, -1]
    assert keys[:4] == KEYS
    found = stream_uniforms(torch.tensor(keys), torch.tensor([0, 1, 2, 3, 4, 5]), 7)
    assert found.dtype == torch.float64
    assert found.tolist() == [splitmix(key, first + 7)[first:] for first, key in enumerate(keys)]


@pytest.mark.parametrize("vocab", [1, 5, 1024, 1025, 1280, 3000])
def test_the_token_is_where_the_cumulative_share_passes_the_number(vocab: int) -> None:
    g = torch.Generator().manual_seed(vocab)
    logits = 3 * torch.randn(64, vocab, generator=g)
    uniforms = torch.rand(64, generator=g, dtype=torch.float64)
    uniforms[:2] = torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64)
    tokens, _ = sample(logits.clone(), uniforms, make_plan([SamplingParams(1)] * 64, vocab, CPU))
    cumulative = logits.double().softmax(-1).cumsum(-1)
    before = torch.where(tokens > 0, cumulative.gather(1, (tokens - 1).clamp(min=0)[:, None]).squeeze(1), 0.0)
    after = cumulative.gather(1, tokens[:, None]).squeeze(1)
    assert bool((before - 1e-5 <= uniforms).all() and (uniforms <= after + 1e-5).all())


def test_a_greedy_row_has_the_logprob_of_temperature_one_among_all_tokens() -> None:
    logits = torch.randn(3, 20, generator=torch.Generator().manual_seed(4))
    uniforms = torch.full((3,), 0.5, dtype=torch.float64)
    greedy = SamplingParams(1, temperature=0.0, top_k=2)
    for params in ([greedy] * 3, [greedy, SamplingParams(1, top_k=3), greedy]):
        tokens, logprobs = sample(logits.clone(), uniforms, make_plan(params, 20, CPU))
        assert tokens[[0, 2]].tolist() == logits.argmax(-1)[[0, 2]].tolist()
        torch.testing.assert_close(logprobs[[0, 2]], logits.log_softmax(-1).amax(-1)[[0, 2]])
