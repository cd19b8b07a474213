"""Nemotron-H in the embedded generator: transformers' numbers, whatever shares a prompt, joins, leaves or changes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nemotron_steps.engine.generation.embedded.decode_batch import DecodeBatch, NewRow
from nemotron_steps.engine.generation.embedded.generator import EmbeddedGenerator
from nemotron_steps.engine.generation.embedded.hybrid_model import (
    CachedHybridModel,
    ExpertWeights,
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
from tests.engine.generation.embedded.embedded_models import HYBRIDS, hub_weights
from tests.engine.generation.embedded.test_generator import (
    assert_same_tokens,
    check_logprobs,
    make,
    prompt_of,
    run,
    shared_model,
)
from tests.engine.policy.batches import grouped_batch, policy_config, rl_loss
from tests.models.hybrid_twins import hybrid_model, write_hybrid


def hybrid(name: str) -> CachedHybridModel:
    reference, architecture = shared_model(name)
    model = CachedHybridModel(architecture, device=torch.device("cpu"), dtype=torch.float32)
    with torch.inference_mode():
        model.load(hub_weights(reference).items())
    return model


def close(found: Any, expected: torch.Tensor) -> None:
    torch.testing.assert_close(torch.as_tensor(found), expected, atol=3e-5, rtol=0)


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("name", HYBRIDS)
def test_prefill_and_decode_logits_match_transformers(name: str, share: bool) -> None:
    reference, model = shared_model(name)[0], hybrid(name)
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
        batch.make_room(40)  # as for a longer prompt
        assert batch.column == 40
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


@torch.inference_mode()
def test_a_prompts_tokens_go_through_the_experts_that_they_chose_alone() -> None:
    model = hybrid("many-experts")
    a, layer = model.architecture, next(each for each in model.layers if isinstance(each, ExpertWeights))
    x = torch.randn(40, a.hidden_size, generator=torch.Generator().manual_seed(0))
    expected = experts(x, layer, a, model.weights)
    close(experts(x, layer, a, model.weights, every=False), expected)
    with _Count() as count:
        PrefixCache(model, 64).compute([tuple(prompt_of(0, 40))])
    assert any("bincount" in name for name in count.found)
