"""The embedded generator: logprobs, seeds, groups, stops, cancellation, weight updates, continuous batching."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemotron_steps.engine.generation.embedded.generator import EmbeddedGenerator
from nemotron_steps.engine.generation.embedded.sampling import stream_key, stream_uniforms
from nemotron_steps.engine.types import Completion, FinishReason, GenerationRequest, SamplingParams
from nemotron_steps.errors import EngineError
from tests.conditioning import assert_conditioned
from tests.engine.generation.embedded.embedded_models import FAMILIES, changed_model, hub_weights, random_model

Done = dict[tuple[str, int], Completion]
shared_model = cache(random_model)


def letters(token_ids: Sequence[int]) -> str:
    return "".join(chr(97 + t % 26) for t in token_ids)


def make(
    family: str = "qwen3-tied", *, rows: int = 16, length: int = 96, **kwargs: Any
) -> tuple[Any, EmbeddedGenerator]:
    model, architecture = shared_model(family)
    kwargs.setdefault("eos_token_ids", [])
    generator = EmbeddedGenerator(
        architecture, hub_weights(model).items(), max_sequences=rows, max_total_length=length, **kwargs
    )
    return model, generator


def drain(generator: EmbeddedGenerator) -> Done:
    done: Done = {}
    for _ in range(10_000):
        if not generator.pending():
            return done
        for completion in generator.step():
            key = (completion.request_id, completion.index)
            assert key not in done
            done[key] = completion
    raise AssertionError("the generator never finished")


def run(generator: EmbeddedGenerator, *requests: GenerationRequest) -> Done:
    for request in requests:
        generator.submit(request)
    return drain(generator)


def full_logprobs(model: Any, prompt: Sequence[int], tokens: Sequence[int], temperature: float = 1.0) -> torch.Tensor:
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None]).squeeze(1)


def check_logprobs(
    completion: Completion, model: Any, prompt: Sequence[int], *, temperature: float = 1.0, part: slice = slice(None)
) -> None:
    """Those of a part of its tokens are those of a full forward pass."""

    def expected(model: Any) -> torch.Tensor:
        return full_logprobs(model, prompt, completion.token_ids, temperature)[part]

    assert_conditioned(torch.tensor(completion.logprobs[part]), expected, model)


def assert_same_tokens(found: Done, expected: Done, model: Any, requests: Sequence[GenerationRequest]) -> None:
    """But for what follows a draw that rounding decides: where two tokens are as good as equally likely, if greedy, or
    where the uniform number that is drawn is as good as the limit between them."""
    assert found.keys() == expected.keys()
    for request, index in ((each, index) for each in requests for index in range(each.n)):
        mine, theirs = (done[request.request_id, index].token_ids for done in (found, expected))
        if mine != theirs:
            agreed = next(place for place, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b)
            tokens = sorted((mine[agreed], theirs[agreed]))
            assert _gap(model, request, index, mine[:agreed], *tokens) < 1e-5, (request.request_id, index, agreed)


def _gap(model: Any, request: GenerationRequest, index: int, before: list[int], low: int, high: int) -> float:
    """How far from each other the draws of two tokens are."""
    with torch.inference_mode():
        logits = model(torch.tensor([[*request.prompt_ids, *before]])).logits[0, -1].double()
    sampling = request.params
    if sampling.temperature == 0:
        return float(max(logits.max() - logits[low], logits.max() - logits[high]))
    assert sampling.seed is not None and sampling.top_p == 1 and sampling.top_k <= 0
    shares = torch.softmax(logits / sampling.temperature, -1).cumsum(-1)
    key = torch.tensor([stream_key(sampling.seed, request.request_id, index)])
    drawn = float(stream_uniforms(key, torch.tensor([len(before)]), 1))
    return float(max((shares[low] - drawn).abs(), (shares[high - 1] - drawn).abs()))


def prompt_of(seed: int, length: int) -> list[int]:
    return torch.randint(0, 96, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_agree_with_a_full_forward(family: str) -> None:
    model, generator = make(family)
    prompts = {f"p{i}": prompt_of(i, 5 + 23 * i) for i in range(4)}  # the last is long enough to be shared
    params = SamplingParams(12, temperature=1.0, seed=3)
    done = run(generator, *(GenerationRequest(name, prompt, params, 3) for name, prompt in prompts.items()))
    assert len(done) == 12
    for (name, _), completion in done.items():
        check_logprobs(completion, model, prompts[name])


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_greedy_equals_transformers_generate(family: str) -> None:
    model, generator = make(family)
    for seed in range(3):
        prompt = prompt_of(seed, 6 + seed)
        with torch.inference_mode():
            ids = torch.tensor([prompt])
            mask = torch.ones_like(ids)
            expected = model.generate(ids, attention_mask=mask, max_new_tokens=20, do_sample=False, pad_token_id=0)
        request = GenerationRequest("a", prompt, SamplingParams(20, temperature=0.0))
        done = run(generator, request)
        theirs = {key: replace(each, token_ids=expected[0, len(prompt) :].tolist()) for key, each in done.items()}
        assert_same_tokens(done, theirs, model, [request])


def test_stop_token_ends_a_completion_and_is_kept() -> None:
    _, generator = make()
    prompt = prompt_of(2, 9)
    free = run(generator, GenerationRequest("a", prompt, SamplingParams(20, temperature=0.0)))["a", 0]
    assert free.finish_reason is FinishReason.LENGTH
    assert len(free.token_ids) == 20
    stop = free.token_ids[7]
    first = free.token_ids.index(stop)
    params = SamplingParams(20, temperature=0.0, stop_token_ids=(stop,))
    stopped = run(
        generator, GenerationRequest("a", prompt, params), GenerationRequest("b", prompt_of(3, 4), SamplingParams(5))
    )
    assert stopped["a", 0].token_ids == free.token_ids[: first + 1]
    assert stopped["a", 0].finish_reason is FinishReason.STOP
    assert len(stopped["a", 0].logprobs) == first + 1
    _, with_eos = make(eos_token_ids=[stop])
    assert (
        run(with_eos, GenerationRequest("a", prompt, SamplingParams(20, temperature=0.0)))["a", 0].token_ids
        == (free.token_ids[: first + 1])
    )


def pieces(token_ids: Sequence[int]) -> str:
    """Tokens are the bytes of a text of two-byte letters; a part of one shows as U+FFFD."""
    return bytes(b for t in token_ids for b in ([0xC3] if t % 2 else [0xA4])).decode(errors="replace")


def words(token_ids: Sequence[int]) -> str:
    """Some tokens are a space, which is dropped where it comes first."""
    return "".join("x" if t % 3 else " " for t in token_ids).lstrip()


@pytest.mark.parametrize(("decode", "stop"), [(pieces, "ä"), (letters, ""), (words, " ")])
def test_a_stop_string_is_found_however_many_tokens_it_takes_and_whatever_shows_of_them(decode: Any, stop: str) -> None:
    _, generator = make(decode=decode)
    prompt = prompt_of(2, 9)
    free = run(generator, GenerationRequest("a", prompt, SamplingParams(30, temperature=0.0)))["a", 0].token_ids
    stop = stop or decode(free)[3:18]
    first = next(n for n in range(1, 31) if stop in decode(free[:n]))
    params = SamplingParams(30, temperature=0.0, stop_strings=("#", stop))
    assert run(generator, GenerationRequest("a", prompt, params))["a", 0].token_ids == free[:first]


def test_cancel_drops_running_and_waiting_members_and_spares_the_rest() -> None:
    model, generator = make(rows=4)
    kept = GenerationRequest("kept", prompt_of(1, 8), SamplingParams(24, seed=1), 2)
    alone = run(generator, kept)
    generator.submit(GenerationRequest("gone", prompt_of(2, 11), SamplingParams(24, seed=1), 6))
    generator.submit(kept)
    for _ in range(3):
        generator.step()
    generator.cancel("gone")
    generator.cancel("unknown")
    assert generator.pending() == 2
    done = drain(generator)
    assert_same_tokens(done, alone, model, [kept])
    generator.submit(GenerationRequest("gone", [1], SamplingParams(1)))
    assert len(drain(generator)) == 1


def test_update_in_flight_continues_under_the_new_version() -> None:
    model, generator = make()
    other = changed_model("qwen3-tied")
    prompt = prompt_of(4, 14)
    generator.submit(GenerationRequest("a", prompt, SamplingParams(10, seed=1), 2))
    for _ in range(3):
        generator.step()
    report = generator.update_weights(other.state_dict().items(), 7)
    assert (report.version, generator.weight_version) == (7, 7)
    assert report.bytes >= sum(p.numel() * 4 for p in other.parameters())
    generator.submit(GenerationRequest("b", prompt, SamplingParams(4, seed=1)))
    done = drain(generator)
    for index in range(2):
        completion = done["a", index]
        versions = completion.weight_versions
        assert versions == sorted(versions)
        assert len(versions) == 10
        old = versions.count(0)
        assert 3 <= old <= 5
        check_logprobs(completion, model, prompt, part=slice(old))
    assert done["b", 0].weight_versions == [7] * 4
    check_logprobs(done["b", 0], other, prompt)  # nothing computed under version 0 was reused


@pytest.mark.parametrize("family", ["qwen3-tied", "latent"])
@pytest.mark.parametrize("length", [14, 90])
def test_recomputed_cache_continues_exactly_as_the_new_weights_would(family: str, length: int) -> None:
    model, generator = make(family, length=128, recompute_kv_cache=True)
    other = changed_model(family)
    prompt = prompt_of(4, length)
    generator.submit(GenerationRequest("a", prompt, SamplingParams(10, seed=1), 3))
    generator.submit(GenerationRequest("b", prompt_of(5, 7), SamplingParams(3, seed=1)))
    for _ in range(4):
        generator.step()
    generator.update_weights(hub_weights(other).items(), 1)
    done = drain(generator)
    assert len(done) == 3
    for completion in done.values():
        old = completion.weight_versions.count(0)
        assert 4 <= old <= 6
        check_logprobs(completion, model, prompt, part=slice(old))
        check_logprobs(completion, other, prompt, part=slice(old, None))


def test_a_member_that_waits_alone_through_an_update_uses_no_old_prefix() -> None:
    """Those of its group that were admitted before have ended; another request holds the row that it waits for."""
    _, generator = make(rows=1)
    other = changed_model("qwen3-tied")
    prompt = prompt_of(4, 14)
    generator.submit(GenerationRequest("a", prompt, SamplingParams(1, seed=1), 2))
    generator.submit(GenerationRequest("b", prompt, SamplingParams(1, seed=1)))
    (first,) = generator.step()
    assert (first.request_id, first.index, first.weight_versions) == ("a", 0, [0])
    generator.update_weights(other.state_dict().items(), 1)
    done = drain(generator)
    assert sorted(done) == [("a", 1), ("b", 0)]
    for completion in done.values():
        assert completion.weight_versions == [1]
        check_logprobs(completion, other, prompt)


def test_bad_requests_are_refused_and_leave_nothing_pending() -> None:
    _, generator = make(length=16)
    good = SamplingParams(4)
    for prompt, params, n in (
        ([], good, 1),
        ([1] * 16, good, 1),
        ([97], good, 1),
        ([1], SamplingParams(0), 1),
        ([1], good, 0),
        ([1], SamplingParams(4, temperature=-1.0), 1),
        ([1], SamplingParams(4, top_p=0.0), 1),
        ([1], SamplingParams(4, stop_strings=("x",)), 1),
    ):
        with pytest.raises(EngineError):
            generator.submit(GenerationRequest("a", prompt, params, n))
    assert generator.pending() == 0
    generator.submit(GenerationRequest("a", [1], good))
    with pytest.raises(EngineError, match="pending"):
        generator.submit(GenerationRequest("a", [1], good))


def test_weights_that_are_not_numbers_stop_generation() -> None:
    model, generator = make()
    broken = {k: torch.full_like(v, float("nan")) for k, v in model.state_dict().items()}
    generator.update_weights(broken.items(), 1)
    generator.submit(GenerationRequest("a", [1, 2], SamplingParams(3)))
    with pytest.raises(EngineError, match="NaN logits"):
        drain(generator)


@pytest.mark.parametrize("family", ["qwen3-tied", "dense"])
@pytest.mark.parametrize("length", [9, 80])
def test_bfloat16_stays_close_to_float32(family: str, length: int) -> None:
    model, generator = make(family, dtype=torch.bfloat16)
    assert generator._batch.states is None or generator._batch.states.ssm.dtype is torch.float32
    prompt = prompt_of(0, length)
    done = run(generator, GenerationRequest("a", prompt, SamplingParams(12, seed=0), 4))
    for completion in done.values():
        expected = full_logprobs(model, prompt, completion.token_ids)
        assert (torch.tensor(completion.logprobs) - expected).abs().mean() < (0.2 if family == "dense" else 0.1)


_requests = st.lists(
    st.tuples(st.integers(1, 30), st.integers(1, 40), st.integers(1, 3), st.integers(0, 6), st.booleans()),
    min_size=1,
    max_size=8,
)


@pytest.mark.parametrize("family", ["qwen3-tied", "mixture"])
@settings(max_examples=15, deadline=None)
@given(_requests, st.integers(1, 6))
def test_random_arrivals_give_the_same_greedy_outputs_as_one_by_one(
    family: str, shapes: list[tuple[int, int, int, int, bool]], rows: int
) -> None:
    """Whatever joins or leaves the batch, stops, or shares a beginning, and however often its columns shift."""
    model, generator = make(family, rows=rows, length=160, eos_token_ids=[5, 17, 60])
    _, single = make(family, rows=1, length=160, eos_token_ids=[5, 17, 60])
    requests, expected, done = [], {}, {}
    for i, (length, new, n, delay, shared) in enumerate(shapes):
        prompt = (prompt_of(99, 85) if shared else []) + prompt_of(i, length)
        request = GenerationRequest(f"r{i}", prompt, SamplingParams(new, temperature=0.0), n)
        requests.append(request)
        generator.submit(request)
        for _ in range(delay):
            done.update({(c.request_id, c.index): c for c in generator.step()})
        alone = run(single, replace(request, n=1))
        expected.update({(f"r{i}", k): alone[f"r{i}", 0] for k in range(n)})
    done.update(drain(generator))
    assert_same_tokens(done, expected, model, requests)
