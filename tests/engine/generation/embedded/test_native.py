"""Decoding by the kernel in C: what the operators give, and bit for bit the same in any batch, on any threads."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nemotron_steps.engine.generation.embedded.decoders import NativeDecoder
from nemotron_steps.engine.generation.embedded.generator import EmbeddedGenerator
from nemotron_steps.engine.types import GenerationRequest, SamplingParams
from tests.conditioning import Conditioned, assert_conditioned
from tests.engine.generation.embedded.embedded_models import FAMILIES, random_model
from tests.engine.generation.embedded.test_generator import (
    Done,
    assert_same_tokens,
    drain,
    full_logprobs,
    prompt_of,
    run,
)

pytestmark = pytest.mark.compiler

shared_model = cache(random_model)
SHARED = prompt_of(99, 64)


def make(
    family: str = "qwen3-tied", model: Any = None, *, rows: int = 6, length: int = 200, **overrides: Any
) -> EmbeddedGenerator:
    shared, architecture = shared_model(family, **overrides)
    model = model or shared
    return EmbeddedGenerator(
        architecture, model.state_dict().items(), max_sequences=rows, max_total_length=length, eos_token_ids=[5]
    )


def both(family: str = "qwen3-tied", **kwargs: Any) -> tuple[EmbeddedGenerator, EmbeddedGenerator]:
    """Two of the same: by the kernel, and operator by operator."""
    native, plain = make(family, **kwargs), make(family, **kwargs)
    assert isinstance(native._decoder, NativeDecoder)
    plain._decoder = None
    return native, plain


def some_requests(temperature: float) -> list[GenerationRequest]:
    """Prompts of one token to longer than what is shared, alone, in groups, and behind a common beginning.

    More rows than fit at once, of many lengths.
    """
    lengths = ((1, 9, 1), (7, 20, 3), (31, 3, 2), (80, 24, 3), (33, 12, 1))
    requests = [
        GenerationRequest(f"r{i}", prompt_of(i, length), SamplingParams(new, temperature, seed=i), n)
        for i, (length, new, n) in enumerate(lengths)
    ]
    return requests + [
        GenerationRequest(f"s{i}", SHARED + prompt_of(i, 3 + i), SamplingParams(8, temperature, seed=i))
        for i in range(5)
    ]


def assert_alike(native: Done, plain: Done, model: Any, requests: Sequence[GenerationRequest]) -> None:
    """The same tokens, but for ties, and both with the logprobs of a full forward pass."""
    assert_same_tokens(native, plain, model, requests)
    assert not any(version for done in (native, plain) for each in done.values() for version in each.weight_versions)
    asked = {request.request_id: (request.prompt_ids, request.params.temperature or 1.0) for request in requests}
    for done in (native, plain) if tokens_of(native) != tokens_of(plain) else (plain,):

        def expected(model: Any, done: Done = done) -> dict[tuple[str, int], list[float]]:
            return {
                key: full_logprobs(model, asked[key[0]][0], each.token_ids, asked[key[0]][1]).tolist()
                for key, each in done.items()
            }

        conditioned = Conditioned(expected, model)
        for other in (native, plain):
            if tokens_of(other) == tokens_of(done):
                conditioned.check({key: each.logprobs for key, each in other.items()})


def tokens_of(done: Done) -> dict[tuple[str, int], list[int]]:
    return {key: completion.token_ids for key, completion in done.items()}


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("family", FAMILIES)
def test_it_samples_what_the_operators_sample(family: str, temperature: float) -> None:
    native, plain = both(family)
    requests = some_requests(temperature)
    assert_alike(run(native, *requests), run(plain, *requests), shared_model(family)[0], requests)


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("llama", {"hidden_size": 40, "intermediate_size": 50}),  # heads of 10, and no size that is whole panels
        ("qwen2", {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 1}),
        ("qwen3", {"head_dim": 64, "num_hidden_layers": 1}),
        ("qwen3", {"head_dim": 128, "hidden_size": 96, "vocab_size": 1500}),
        ("qwen3-tied", {"vocab_size": 97, "intermediate_size": 4}),
    ],
)
def test_it_takes_models_of_any_sizes(family: str, sizes: dict[str, int]) -> None:
    native, plain = both(family, **sizes)
    requests = some_requests(1.0)
    assert_alike(run(native, *requests), run(plain, *requests), shared_model(family, **sizes)[0], requests)


@pytest.mark.usefixtures("kernels_for")
def test_it_does_with_vectors_of_any_width() -> None:
    test_it_takes_models_of_any_sizes("qwen2", {"hidden_size": 40, "intermediate_size": 50, "num_attention_heads": 2})


LATE = [GenerationRequest(f"r{i}", prompt_of(i, 3 + 17 * (i % 4)), SamplingParams(90, seed=i), 2) for i in range(20)]


def late_arrivals(generator: EmbeddedGenerator) -> tuple[Done, int]:
    """Rows that join a batch in use, so that its columns shift, and grow; and how often they moved."""
    done: Done = {}
    moves, column = 0, 0
    for request in LATE:
        generator.submit(request)
        for _ in range(19):
            done |= {(c.request_id, c.index): c for c in generator.step()}
            moves += generator._batch.column <= column
            column = generator._batch.column
    return done | drain(generator), moves


def test_rows_that_join_and_leave_shift_and_widen_the_cache() -> None:
    native, plain = both(rows=6, length=150)
    columns, allocation = native._batch.columns, native._batch.allocation
    done, moves = late_arrivals(native)
    assert native._batch.columns > columns
    assert native._batch.allocation > allocation + 1
    assert moves > 1
    assert_alike(done, late_arrivals(plain)[0], shared_model("qwen3-tied")[0], LATE)


def scaled(model: Any, factor: float) -> dict[str, torch.Tensor]:
    return {name: weight * factor for name, weight in model.state_dict().items()}


Found = dict[tuple[str, int], tuple[list[int], list[float], list[int]]]


def updated(generator: EmbeddedGenerator, model: Any) -> Found:
    """What is drawn while weights change, and by which."""
    for i, length in enumerate((9, 70)):
        generator.submit(GenerationRequest(f"r{i}", prompt_of(i, length), SamplingParams(20, seed=i), 4))
    for version, factor in ((1, 1.1), (2, 0.9)):
        for _ in range(4):
            generator.step()
        generator.update_weights(scaled(model, factor).items(), version)
    return {key: (c.token_ids, c.logprobs, c.weight_versions) for key, c in drain(generator).items()}


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("family", ["qwen2", "qwen3-tied"])
def test_other_weights_are_used_from_the_next_step_on(family: str, recompute: bool) -> None:
    def by_torch(model: Any) -> Found:
        generator = make(family, model, rows=12)
        generator._recompute, generator._decoder = recompute, None
        return updated(generator, model)

    native, model = make(family, rows=12), shared_model(family)[0]
    native._recompute = recompute
    found = updated(native, model)
    assert {version for _, _, versions in found.values() for version in versions} >= {0, 1, 2}
    assert_conditioned(found, by_torch, model)


def exactly(done: Done) -> dict[tuple[str, int], tuple[list[int], list[float]]]:
    return {key: (completion.token_ids, completion.logprobs) for key, completion in done.items()}


@pytest.mark.parametrize("rows", [3, 40])
def test_threads_change_no_bit(rows: int) -> None:
    def generate(threads: int) -> Done:
        generator = make(rows=rows)
        for i, length in enumerate((9, 70, 33)):
            generator.submit(GenerationRequest(f"r{i}", prompt_of(i, length), SamplingParams(24, seed=i), rows // 3))
        done = {(c.request_id, c.index): c for c in generator.step()}  # prompts are fed by torch, on one thread
        torch.set_num_threads(threads)
        return done | drain(generator)

    before = torch.get_num_threads()
    results = []
    for threads in (1, 2, 3, 7):
        try:
            torch.set_num_threads(1)
            results.append(exactly(generate(threads)))
        finally:
            torch.set_num_threads(before)
    assert len(results[0]) == rows // 3 * 3
    assert all(result == results[0] for result in results)


TARGET = SHARED[:48] + prompt_of(7, 5)


def among(others: Sequence[tuple[int, int, int, bool]], temperature: float) -> Done:
    """The target's completions among others that join before and after it.

    Args:
        others: (prompt length, new tokens, steps before the next one, whether it begins as the target does); the
            target is the third to come.
    """
    generator = make(rows=9, length=120)
    with torch.inference_mode():
        generator._prompts.compute([tuple(TARGET)])  # alone: torch's products of other sizes round differently
    target = GenerationRequest("target", TARGET, SamplingParams(20, temperature, seed=1), 2)
    done: Done = {}
    requests = [
        (GenerationRequest(f"o{i}", TARGET[:48] * begins + prompt_of(i, length), SamplingParams(new, temperature)), gap)
        for i, (length, new, gap, begins) in enumerate(others)
    ]
    requests.insert(2, (target, 1))
    for request, gap in requests:
        generator.submit(request)
        for _ in range(gap):
            done |= {(c.request_id, c.index): c for c in generator.step()}
    done |= drain(generator)
    return {key: completion for key, completion in done.items() if key[0] == "target"}


@settings(max_examples=25)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 50), st.integers(0, 6), st.booleans()), max_size=12),
    st.sampled_from([0.0, 0.7, 1.0]),
)
@example([(3, 40, 0, True)] * 6, 1.0)  # who begins alike shares that beginning
@example([(30, 60, 5, False)] * 12, 0.7)
def test_other_rows_change_no_bit(others: list[tuple[int, int, int, bool]], temperature: float) -> None:
    assert exactly(among(others, temperature)) == exactly(among([], temperature))


def test_batches_of_other_sampling_are_decoded_by_torch_and_then_by_the_kernel() -> None:
    other = SamplingParams(8, top_p=0.7, seed=1)

    def generate(generator: EmbeddedGenerator) -> dict[tuple[str, int], tuple[list[int], list[float]]]:
        plain = GenerationRequest("plain", prompt_of(0, 40), SamplingParams(30, seed=0), 2)
        generator.submit(plain)
        for request in (None, GenerationRequest("other", prompt_of(1, 9), other)):
            if request is not None:
                generator.submit(request)
            generator.step()
            if generator._decoder is not None:
                assert generator._decoder.takes(generator._plan) is (request is None)
        done = drain(generator)
        assert generator._decoder is None or generator._decoder.takes(generator._plan)
        return exactly(done)

    def by_torch(model: Any) -> dict[tuple[str, int], tuple[list[int], list[float]]]:
        generator = make(model=model, rows=4)
        generator._decoder = None
        return generate(generator)

    assert_conditioned(generate(make(rows=4)), by_torch, shared_model("qwen3-tied")[0])
