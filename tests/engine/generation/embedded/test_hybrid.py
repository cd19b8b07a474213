"""Nemotron-H in the embedded generator: transformers' numbers, whatever shares a prompt, joins, leaves or changes."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from nemotron_steps.engine.generation.embedded.decode_batch import DecodeBatch, NewRow
from nemotron_steps.engine.generation.embedded.generator import EmbeddedGenerator
from nemotron_steps.engine.generation.embedded.hybrid_model import (
    CachedHybridModel,
    experts,
    mamba_step,
    mamba_step_on_device,
)
from nemotron_steps.engine.generation.embedded.prefix_cache import PrefixCache
from nemotron_steps.engine.policy.megatron import MegatronPolicy
from nemotron_steps.engine.types import GenerationRequest, SamplingParams
from nemotron_steps.models.architecture import Architecture
from nemotron_steps.models.huggingface import load_hf_weights
from tests.conditioning import assert_conditioned
from tests.engine.generation.embedded.embedded_models import hub_weights
from tests.engine.generation.embedded.test_generator import (
    assert_same_tokens,
    check_logprobs,
    drain,
    full_logprobs,
    prompt_of,
    run,
)
from tests.engine.policy.batches import grouped_batch, policy_config, rl_loss
from tests.models.hybrid_twins import hybrid_model, write_hybrid

# More experts than a prompt's tokens compute all of, in groups, and time steps at their lower bound; no attention and
# no convolution bias; no Mamba-2.
_BOUNDED = {"time_step_min": 0.05, "time_step_limit": (0.05, float("inf"))}
TWINS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("dense", {}),
    "mixture": ("mixture", {}),
    "latent": ("latent", {}),
    "many-experts": ("mixture", {"n_routed_experts": 16, "n_group": 4, "topk_group": 2, **_BOUNDED}),
    # transformers' cache asks for an attention layer
    "no-attention": ("dense", {"pattern": "M-M", "use_conv_bias": False, "use_cache": False}),
    "no-mamba": ("dense", {"pattern": "*-*-"}),
}


def twin(name: str, seed: int = 0) -> tuple[Any, Architecture]:
    """A transformers model and its Architecture."""
    of, changes = TWINS[name]
    model = hybrid_model(of, seed, **changes)
    return model, Architecture.from_config(model.config.to_dict())


shared_twin = cache(twin)


def make(name: str, *, rows: int = 16, length: int = 96, **kwargs: Any) -> tuple[Any, EmbeddedGenerator]:
    model, architecture = shared_twin(name)
    kwargs.setdefault("eos_token_ids", [])
    weights = hub_weights(model).items()
    return model, EmbeddedGenerator(architecture, weights, max_sequences=rows, max_total_length=length, **kwargs)


def hybrid(name: str) -> CachedHybridModel:
    reference, architecture = shared_twin(name)
    model = CachedHybridModel(architecture, device=torch.device("cpu"), dtype=torch.float32)
    with torch.inference_mode():
        model.load(hub_weights(reference).items())
    return model


def tokens(seed: int, length: int) -> tuple[int, ...]:
    return tuple(prompt_of(seed, length))


def close(found: Any, expected: torch.Tensor) -> None:
    torch.testing.assert_close(torch.as_tensor(found), expected, atol=3e-5, rtol=0)


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("name", TWINS)
def test_prefill_and_decode_logits_match_transformers(name: str, share: bool) -> None:
    reference, model = shared_twin(name)[0], hybrid(name)
    lengths, steps = [1, 3, 9, 17], 6
    rows = [prompt_of(i, n + steps) for i, n in enumerate(lengths)]
    found: list[list[torch.Tensor]] = [[] for _ in rows]

    @torch.inference_mode()
    def expected(reference: Any) -> list[torch.Tensor]:
        return [reference(torch.tensor([row[:-1]])).logits[0, n - 1 :] for row, n in zip(rows, lengths, strict=True)]

    with torch.inference_mode():
        batch = DecodeBatch(model, 5, 64)
        prompts = [tuple(row[:n]) for row, n in zip(rows, lengths, strict=True)]
        computed = PrefixCache(model, 64).compute(prompts)
        batch.make_room(max(lengths))
        shared = [None, computed[prompts[1]] if share else None, None, None]
        batch.add([NewRow(computed[p], s, 0, 0) for p, s in zip(prompts, shared, strict=True)])
        logits = torch.stack([computed[p].logits for p in prompts])
        for step in range(steps):
            for i, n in enumerate(lengths):
                found[i].append(logits[i].clone())
                batch.tokens[i, batch.column] = rows[i][n + step]
            newest, positions = batch.newest()
            logits = model.decode(newest, positions, batch.decode_view())
            batch.column += 1
        assert_conditioned([torch.stack(each) for each in found], expected, reference)


def test_a_checkpoint_generates_without_its_multi_token_prediction(tmp_path: Path) -> None:
    write_hybrid("mtp", tmp_path)
    weights = load_hf_weights(tmp_path)
    assert any(name.startswith("mtp.") for name in weights)
    generator = EmbeddedGenerator(
        Architecture.from_folder(tmp_path), weights.items(), max_sequences=2, max_total_length=64, eos_token_ids=[]
    )
    prompt = prompt_of(1, 20)
    done = run(generator, GenerationRequest("a", prompt, SamplingParams(8, seed=0)))["a", 0]
    check_logprobs(done, hybrid_model("mtp"), prompt)


def changed(name: str, steps: int) -> Any:
    """The twin after so many updates of every weight and buffer, those that stay float32 in any precision included."""
    model, _ = twin(name)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for _ in range(steps):
            for tensor in model.state_dict().values():
                tensor.add_(0.02 * torch.randn(tensor.shape, generator=generator))
    return model


@pytest.mark.parametrize("name", ["dense", "latent"])
def test_generator_and_policy_agree_after_1_5_and_20_updates(name: str, tmp_path: Path) -> None:
    """token_mult_prob_error of what is sampled, in float32, biases and the recurrence being trained too."""
    write_hybrid(name, tmp_path, initializer_range=0.1)
    balanced = {"moe_router_bias_update_rate": 1e-3, "optimizer": {"lr": 1e-3}}
    policy = MegatronPolicy(policy_config(megatron_cfg=balanced), tmp_path, rl_loss())
    generator = EmbeddedGenerator(
        Architecture.from_folder(tmp_path), policy.weights(), max_sequences=16, max_total_length=64, eos_token_ids=[]
    )
    prompts = {f"p{i}": prompt_of(i, 4 + 13 * i) for i in range(3)}
    for step in range(1, 21):
        policy.train_step(grouped_batch(step))
        if step not in (1, 5, 20):
            continue
        generator.update_weights(policy.weights(), step)
        requests = [GenerationRequest(p, ids, SamplingParams(12, seed=step), 4) for p, ids in prompts.items()]
        done = run(generator, *requests)
        batch = grouped_batch(0, prompts=((8, len(done)),))
        for row, ((p, _), completion) in enumerate(done.items()):
            ids = [*prompts[p], *completion.token_ids]
            batch.input_ids[row, : len(ids)] = torch.tensor(ids)
            batch.lengths[row] = len(ids)
            batch.token_mask[row] = 0
            batch.token_mask[row, len(prompts[p]) : len(ids)] = 1
            batch.generation_logprobs[row, len(prompts[p]) : len(ids)] = torch.tensor(completion.logprobs)
        apart = (policy.logprobs(batch) - batch.generation_logprobs).abs()[batch.token_mask.bool()]
        assert apart.numel() == 12 * len(done)
        assert float(apart.exp().mean()) < 1.0001


@pytest.mark.parametrize("length", [14, 90])
def test_recomputed_states_continue_exactly_as_the_new_weights_would(length: int) -> None:
    model, generator = make("latent", length=128, recompute_kv_cache=True)
    other = changed("latent", 3)
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


_requests = st.lists(
    st.tuples(st.integers(1, 30), st.integers(1, 40), st.integers(1, 3), st.integers(0, 6), st.booleans()),
    min_size=1,
    max_size=8,
)


@settings(max_examples=12, deadline=None)
@given(_requests, st.integers(1, 6))
def test_random_arrivals_give_the_same_greedy_outputs_as_one_by_one(
    shapes: list[tuple[int, int, int, int, bool]], rows: int
) -> None:
    """Whatever joins or leaves the batch, stops, or shares a beginning, and however often its columns shift."""
    model, generator = make("mixture", rows=rows, length=160, eos_token_ids=[5, 17, 60])
    _, single = make("mixture", rows=1, length=160, eos_token_ids=[5, 17, 60])
    requests, expected, done = [], {}, {}
    for i, (length, new, n, delay, shared) in enumerate(shapes):
        prompt = (prompt_of(99, 85) if shared else []) + prompt_of(i, length)
        request = GenerationRequest(f"r{i}", prompt, SamplingParams(new, temperature=0.0), n)
        requests.append(request)
        generator.submit(request)
        for _ in range(delay):
            done.update({(c.request_id, c.index): c for c in generator.step()})
        alone = run(single, replace(request, n=1))[f"r{i}", 0]
        expected.update({(f"r{i}", k): alone for k in range(n)})
    done.update(drain(generator))
    assert_same_tokens(done, expected, model, requests)
    for key, completion in done.items():
        same = completion.token_ids == expected[key].token_ids
        assert not same or completion.finish_reason == expected[key].finish_reason


def assert_same(found: Any, expected: Any) -> None:
    for a, b in (
        (found.keys, expected.keys),
        (found.values, expected.values),
        (found.logits, expected.logits),
        (found.states.ssm, expected.states.ssm),
        (found.states.window, expected.states.window),
    ):
        torch.testing.assert_close(a, b, atol=3e-5, rtol=1e-4)


@torch.inference_mode()
def test_common_beginnings_are_computed_once_and_continued_from_their_own_end() -> None:
    model = hybrid("mixture")
    instructions = tokens(0, 90)
    prompts = [instructions + tokens(i, 5 + i) for i in range(1, 9)] + [tokens(99, 40), instructions[:32]]
    cache = PrefixCache(model, 100_000)
    computed = cache.compute(prompts)
    for prompt in prompts:
        assert_same(computed[prompt], PrefixCache(model, 0).compute([prompt])[prompt])
    assert cache.fed_tokens <= sum(map(len, prompts)) - 7 * 80
    fed = cache.fed_tokens
    assert cache.compute(prompts).keys() == set(prompts)
    assert cache.fed_tokens == fed
    later = instructions + tokens(50, 7)  # from the end of the 80 tokens that were computed by themselves
    assert_same(cache.compute([later])[later], PrefixCache(model, 0).compute([later])[later])
    assert cache.fed_tokens == fed + len(later) - 80


def test_memory_that_was_given_back_is_taken_again() -> None:
    model, generator = make("mixture")
    request = GenerationRequest("a", prompt_of(1, 40), SamplingParams(12, seed=0), 3)
    first = run(generator, request)
    batch = generator._batch
    before = batch.cache_bytes
    assert before == batch.keys.nbytes + batch.values.nbytes + batch.states.ssm.nbytes + batch.states.inputs.nbytes
    with torch.inference_mode():
        generator._compact(force=True)
        batch.free()
    assert batch.cache_bytes == 0
    assert_same_tokens(run(generator, request), first, model, [request])
    assert batch.cache_bytes == before


class _Count(TorchDispatchMode):
    """Counts operators that compute."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("kind", "most"), [("M", 31), ("E", 29), ("*", 14), ("-", 10)])
def test_a_decoding_step_takes_few_operators_a_layer(kind: str, most: int) -> None:
    """What bounds a tiny model on CPU. Counted as the difference that one more layer makes."""
    counts = []
    for pattern in (f"M*E-{kind}", f"M*E-{kind}{kind}"):
        reference = hybrid_model("latent", pattern=pattern)
        architecture = Architecture.from_config(reference.config.to_dict())
        generator = EmbeddedGenerator(
            architecture, hub_weights(reference).items(), max_sequences=8, max_total_length=64, eos_token_ids=[]
        )
        generator.submit(GenerationRequest("a", prompt_of(0, 9), SamplingParams(9, seed=0), 8))
        generator.step()
        with _Count() as count:
            generator.step()
        counts.append(len(count.found))
    assert 0 < counts[1] - counts[0] <= most


@torch.inference_mode()
def test_the_step_of_a_cuda_graph_is_the_same_and_reads_nothing_back_to_the_host() -> None:
    model = hybrid("mixture")
    a, mamba, routed = model.architecture, model.layers[0], model.layers[1]
    states, on_device = model.new_row_states(5), model.new_row_states(5)
    noise = torch.Generator().manual_seed(0)
    for _ in range(6):  # once around the ring, and on
        x = torch.randn(5, a.hidden_size, generator=noise)
        expected = mamba_step(x, mamba, a.mamba, model.weights, states.layers(5)[0], states.newest)
        on_device.place.fill_(on_device.newest)
        layer, place = on_device.layers(5)[0], on_device.place
        with _Count() as count:
            found = mamba_step_on_device(x, mamba, a.mamba, model.weights, layer, place)
            experts(found, routed, a, model.weights)
        close(found, expected)
        close(on_device.ssm[0], states.ssm[0])
        assert len(count.found) > 20
        assert not any("local_scalar" in name or "nonzero" in name or "bincount" in name for name in count.found)
        states.advance()
        on_device.advance()


@pytest.mark.parametrize("length", [9, 80])
def test_bfloat16_stays_close_to_float32(length: int) -> None:
    model, generator = make("dense", dtype=torch.bfloat16)
    assert generator._batch.states.ssm.dtype is torch.float32
    prompt = prompt_of(0, length)
    done = run(generator, GenerationRequest("a", prompt, SamplingParams(12, seed=0), 4))
    for completion in done.values():
        expected = full_logprobs(model, prompt, completion.token_ids)
        assert (torch.tensor(completion.logprobs) - expected).abs().mean() < 0.2
