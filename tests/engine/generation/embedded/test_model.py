"""The embedded generator's forward pass against transformers, for every family and rotary scaling."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nemotron_steps.engine.generation.embedded.decode_batch import DecodeBatch, NewRow
from nemotron_steps.engine.generation.embedded.dense_model import CachedDenseModel
from nemotron_steps.engine.generation.embedded.prefix_cache import PrefixCache
from nemotron_steps.errors import EngineError, UnsupportedError
from nemotron_steps.models.architecture import Architecture
from tests.conditioning import assert_conditioned
from tests.engine.generation.embedded.embedded_models import FAMILIES, random_model


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_prefill_and_decode_logits_match_transformers(family: str, share: bool) -> None:
    reference, architecture = random_model(family)
    generator = torch.Generator().manual_seed(1)
    lengths, steps = [3, 9, 17], 6
    rows = [torch.randint(0, architecture.vocab_size, (n + steps,), generator=generator).tolist() for n in lengths]
    found: list[list[torch.Tensor]] = [[] for _ in rows]

    @torch.inference_mode()
    def expected(reference: Any) -> list[torch.Tensor]:
        return [reference(torch.tensor([row[:-1]])).logits[0, n - 1 :] for row, n in zip(rows, lengths, strict=True)]

    with torch.inference_mode():
        model = CachedDenseModel(architecture, max_positions=64, device=torch.device("cpu"), dtype=torch.float32)
        model.load(reference.state_dict().items())
        batch = DecodeBatch(model, 4, 64)
        prompts = [tuple(row[:n]) for row, n in zip(rows, lengths, strict=True)]
        computed = PrefixCache(model, 64).compute(prompts)
        batch.make_room(max(lengths))
        shared = [computed[prompts[0]] if share else None, None, None]
        batch.add([NewRow(computed[p], s, 0, 0) for p, s in zip(prompts, shared, strict=True)])
        logits = torch.stack([computed[p].logits for p in prompts])
        for step in range(steps):
            for i, n in enumerate(lengths):
                found[i].append(logits[i].clone())
                batch.tokens[i, batch.column] = rows[i][n + step]
            tokens, positions = batch.newest()
            logits = model.decode(tokens, positions, batch.decode_view())
            batch.column += 1
        assert_conditioned([torch.stack(each) for each in found], expected, reference)


def test_load_refuses_wrong_weights() -> None:
    reference, architecture = random_model("qwen3-tied")
    model = CachedDenseModel(architecture, max_positions=8, device=torch.device("cpu"), dtype=torch.float32)
    weights = dict(reference.state_dict())
    with pytest.raises(EngineError, match="name"):
        model.load({**weights, "model.layers.9.mlp.up_proj.weight": torch.zeros(1)}.items())
    with pytest.raises(EngineError, match="shape"):
        model.load({**weights, "model.norm.weight": torch.zeros(3)}.items())
    name = "model.layers.0.self_attn.k_norm.weight"
    with pytest.raises(EngineError, match="missing") as missing:
        model.load((k, v) for k, v in weights.items() if k != name)
    assert name in str(missing.value)


def test_mixtures_of_experts_are_refused() -> None:
    architecture = Architecture(
        family="qwen3_moe", hidden_size=8, num_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=4,
        ffn_hidden_size=8, vocab_size=16, rope_theta=1e4, norm_eps=1e-6, max_position_embeddings=32, num_experts=4,
    )  # fmt: skip
    with pytest.raises(UnsupportedError, match="mixture"):
        CachedDenseModel(architecture, max_positions=8, device=torch.device("cpu"), dtype=torch.float32)
