"""Twins of public models: their family, layers, heads, key-value heads and experts, at widths for a test."""

from pathlib import Path
from typing import Any

from nemotron_steps.config.families import NAMES
from tests.config.layout.memory.shapes import NANO_30B, SUPER_120B
from tests.models.checkpoints import write_tokenizer

WIDTHS = {"hidden_size": 64, "intermediate_size": 16, "vocab_size": 64, "head_dim": 2}
EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 16, "norm_topk_prob": True}


def _shape(layers: int, heads: int, shared: int, positions: int = 40_960, **more: Any) -> dict[str, Any]:
    return {
        **WIDTHS,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": shared,
        "max_position_embeddings": positions,
        **more,
    }


def _nemotron(of: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Layers, heads, groups and experts of a Nemotron 3."""
    pattern = of["hybrid_override_pattern"]
    kept = ("mamba_num_heads", "n_groups", "n_routed_experts", "num_experts_per_tok")
    return {
        **_shape(len(pattern), of["num_attention_heads"], of["num_key_value_heads"], 262_144),
        **{name: of[name] for name in kept},
        "layers_block_type": [NAMES[kind][-1] for kind in pattern],
        "mamba_head_dim": 1,
        "ssm_state_size": 8,
        "moe_intermediate_size": 16,
        "moe_shared_expert_intermediate_size": 16,
        **more,
    }


TWINS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3-0.6B": ("qwen3", _shape(28, 16, 8, tie_word_embeddings=True)),
    "Qwen3-8B": ("qwen3", _shape(36, 32, 8)),
    "Qwen3-32B": ("qwen3", _shape(64, 64, 8)),
    "Llama-3.1-8B": ("llama", _shape(32, 32, 8, 131_072)),
    "Llama-3.1-70B": ("llama", _shape(80, 64, 8, 131_072)),
    "Qwen3-30B-A3B": ("qwen3_moe", _shape(48, 32, 4, **EXPERTS)),
    "Qwen3-235B-A22B": ("qwen3_moe", _shape(94, 64, 4, **EXPERTS)),
    "Nemotron-3-Nano": ("nemotron_h", _nemotron(NANO_30B)),
    "Nemotron-3-Super": ("nemotron_h", _nemotron(SUPER_120B, moe_latent_size=16)),
}
"""Name → config.json's model_type, and its settings."""


def write_twin(name: str, folder: Path) -> None:
    """A Hugging Face folder with random weights, tokenizer and chat template."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, settings = TWINS[name]
    config = AutoConfig.for_model(model_type, bos_token_id=1, eos_token_id=2, **settings)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    write_tokenizer(folder, settings["vocab_size"])
