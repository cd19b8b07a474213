"""No tensor is left out of a model, or made up, that is not what the model makes of the others: by any reader."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from nemotron_steps.engine.policy.dtensor import DTensorPolicy
from nemotron_steps.engine.policy.hf_model import load_hf_model
from nemotron_steps.engine.policy.megatron import MegatronPolicy
from nemotron_steps.errors import ArtifactError
from nemotron_steps.models.huggingface import load_hf_weights
from nemotron_steps.models.megatron_checkpoint import (
    convert_hf_to_megatron,
    convert_megatron_to_hf,
)
from tests.engine.policy.batches import policy_config, rl_loss
from tests.models.checkpoints import write_checkpoint

HEAD, WORDS, ANGLES = "lm_head.weight", "model.embed_tokens.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"
_TWO = "tie_word_embeddings: true, but lm_head.weight and model.embed_tokens.weight differ"


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], str | None]] = {
    "tied, and the same again": ({HEAD: lambda w: w[WORDS].clone()}, {}, None),
    "tied, and another": ({HEAD: lambda w: w[WORDS] + 1e-3}, {}, _TWO),
    "not tied, and another": ({HEAD: lambda w: w[WORDS] + 1e-3}, {"tie_word_embeddings": False}, None),
    "not tied, and none": ({}, {"tie_word_embeddings": False}, "lacks the tensor lm_head.weight"),
    "frequencies": ({ANGLES: lambda w: torch.ones(16)}, {}, None),
    "a tensor too many": ({"score.weight": lambda w: w[WORDS][:1].clone()}, {}, "no place for: score.weight"),
    "a tensor too few": ({"model.norm.weight": None}, {}, "lacks the tensor model.norm.weight"),
}


@pytest.mark.parametrize("case", CASES)
def test_every_reader_takes_the_model_whole_or_refuses_it(case: str, tmp_path: Path) -> None:
    changes, config, refusal = CASES[case]
    source = tmp_path / "in"
    write_checkpoint("qwen3_tied", source)
    weights = load_file(source / "model.safetensors")
    for name, made in changes.items():
        if made is None:
            del weights[name]
        else:
            weights[name] = made(weights)
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    stated = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**stated, **config}))
    readers = (
        lambda: convert_hf_to_megatron(source, tmp_path / "megatron"),
        lambda: MegatronPolicy(policy_config(), source, rl_loss()),
        lambda: load_hf_model(source, activation_checkpointing=False),
    )
    for read in readers:
        if refusal is None:
            read()
            continue
        with pytest.raises(ArtifactError, match=refusal):
            read()
    if refusal is None:
        convert_megatron_to_hf(tmp_path / "megatron", tmp_path / "out")
        before, after = (load_hf_model(each, activation_checkpointing=False) for each in (source, tmp_path / "out"))
        ids = torch.arange(3, 20)[None]
        torch.testing.assert_close(after(ids).logits, before(ids).logits, atol=0, rtol=0)


def test_tensors_that_transformers_leaves_in_the_file_are_in_what_is_saved(tmp_path: Path) -> None:
    """Of a family without a mapping: those of multi-token prediction, as of DeepSeek-V3 and GLM-4.5."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from tests.models.checkpoints import SIZES, write_tokenizer

    sizes = {**SIZES, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "pad_token_id": 0}
    config = AutoConfig.for_model("glm4_moe", moe_intermediate_size=24, bos_token_id=1, eos_token_id=2, **sizes)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path / "in")
    write_tokenizer(tmp_path / "in")
    weights = load_file(tmp_path / "in" / "model.safetensors")
    weights["model.layers.92.eh_proj.weight"] = torch.randn(4, 4)
    save_file(weights, tmp_path / "in" / "model.safetensors", metadata={"format": "pt"})
    config = policy_config(dtensor_cfg={"enabled": True})
    DTensorPolicy(config, tmp_path / "in", rl_loss()).save_hf(tmp_path / "out")
    after = load_hf_weights(tmp_path / "out")
    assert after.keys() == weights.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in weights.items())
