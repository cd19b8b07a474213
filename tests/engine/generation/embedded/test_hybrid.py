"""Nemotron-H in the embedded generator: transformers' numbers, whatever shares a prompt, joins, leaves or changes."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from nemotron_steps.engine.generation.embedded.base import CachedModel
from nemotron_steps.engine.generation.embedded.batch import DecodeBatch, NewRow
from nemotron_steps.engine.generation.embedded.generator import EmbeddedGenerator
from nemotron_steps.engine.generation.embedded.hybrid import HybridModel
from nemotron_steps.engine.generation.embedded.prefix import PrefixCache
from nemotron_steps.engine.types import GenerationRequest, SamplingParams
from nemotron_steps.errors import EngineError
from nemotron_steps.models.architecture import Architecture
from nemotron_steps.models.huggingface import load_hf_weights
from tests.engine.generation.embedded.embedded_models import hub_weights
from tests.engine.generation.embedded.test_generator import full_logprobs, prompt_of, run
from tests.models.hybrid_twins import hybrid_model, write_hybrid

# More experts than a prompt's tokens compute all of, in groups; no attention; no Mamba-2; no convolution bias.
TWINS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("dense", {}),
    "mixture": ("mixture", {}),
    "latent": ("latent", {}),
    "many-experts": ("mixture", {"n_routed_experts": 16, "n_group": 4, "topk_group": 2}),
    "no-attention": ("dense", {"pattern": "M-M", "use_conv_bias": False}),
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


def hybrid(name: str) -> CachedModel:
    reference, architecture = shared_twin(name)
    model = HybridModel(architecture, device=torch.device("cpu"), dtype=torch.float32)
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
    with torch.inference_mode():
        expected = [reference(torch.tensor([row])).logits[0] for row in rows]
        batch = DecodeBatch(model, 5, 64)
        prompts = [tuple(row[:n]) for row, n in zip(rows, lengths, strict=True)]
        computed = PrefixCache(model, 64).compute(prompts)
        batch.make_room(max(lengths))
        shared = [None, computed[prompts[1]] if share else None, None, None]
        batch.add([NewRow(computed[p], s, 0, 0) for p, s in zip(prompts, shared, strict=True)])
        logits = torch.stack([computed[p].logits for p in prompts])
        for step in range(steps):
            for i, n in enumerate(lengths):
                close(logits[i], expected[i][n - 1 + step])
                batch.tokens[i, batch.column] = rows[i][n + step]
            newest, positions = batch.newest()
            logits = model.decode(newest, positions, batch.decode_view())
            batch.column += 1


@pytest.mark.parametrize("name", TWINS)
def test_logprobs_of_groups_of_mixed_lengths_agree_with_a_full_forward(name: str) -> None:
    model, generator = make(name)
    prompts = {f"p{i}": prompt_of(i, 5 + 23 * i) for i in range(4)}  # the last is long enough to be shared
    params = SamplingParams(12, temperature=1.0, seed=3)
    done = run(generator, *(GenerationRequest(name, prompt, params, 3) for name, prompt in prompts.items()))
    assert len(done) == 12
    assert generator._prompts.fed_tokens == sum(map(len, prompts.values()))  # a group's prompt once
    for (name, _), completion in done.items():
        close(completion.logprobs, full_logprobs(model, prompts[name], completion.token_ids))


@pytest.mark.parametrize("name", ["dense", "mixture", "latent"])
def test_greedy_equals_transformers_generate(name: str) -> None:
    model, generator = make(name)
    for seed in range(3):
        prompt = prompt_of(seed, 6 + 9 * seed)
        with torch.inference_mode():
            ids = torch.tensor([prompt])
            expected = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False, eos_token_id=None
            )
        done = run(generator, GenerationRequest("a", prompt, SamplingParams(20, temperature=0.0)))
        assert done["a", 0].token_ids == expected[0, len(prompt) :].tolist()


def test_a_checkpoint_generates_without_its_multi_token_prediction(tmp_path: Path) -> None:
    write_hybrid("mtp", tmp_path)
    weights = load_hf_weights(tmp_path)
    assert any(name.startswith("mtp.") for name in weights)
    generator = EmbeddedGenerator(
        Architecture.from_folder(tmp_path), weights.items(), max_sequences=2, max_total_length=64, eos_token_ids=[]
    )
    prompt = prompt_of(1, 20)
    done = run(generator, GenerationRequest("a", prompt, SamplingParams(8, seed=0)))["a", 0]
    close(done.logprobs, full_logprobs(hybrid_model("mtp"), prompt, done.token_ids))


def test_load_refuses_wrong_weights() -> None:
    model = hybrid("latent")
    weights = hub_weights(shared_twin("latent")[0])
    with pytest.raises(EngineError, match="name"):
        model.load({**weights, "backbone.layers.0.mixer.gate_proj.weight": torch.zeros(1)}.items())
    with pytest.raises(EngineError, match="shape"):
        model.load({**weights, "backbone.layers.0.mixer.A_log": torch.zeros(3)}.items())
    for name in ("backbone.layers.1.mixer.experts.7.down_proj.weight", "backbone.layers.0.mixer.dt_bias"):
        with pytest.raises(EngineError, match="missing") as missing:
            model.load((k, v) for k, v in weights.items() if k != name)
        assert name in str(missing.value)
