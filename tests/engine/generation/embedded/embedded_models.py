"""Random tiny transformers models, dense and hybrid, with biases and norms that are not zeros and ones."""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from nemotron_steps.models.architecture import Architecture
from tests.models.hybrid_twins import hybrid_model

_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama-rope3": {"model_type": "llama", "rope_parameters": _LLAMA3, "tie_word_embeddings": True},
    "llama-linear": {
        "model_type": "llama",
        "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
    },
    "qwen2": {"model_type": "qwen2"},
    "qwen2-yarn": {"model_type": "qwen2", "rope_parameters": _YARN},
    "qwen3": {"model_type": "qwen3", "head_dim": 24},
    "qwen3-tied": {"model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True},
    "qwen3-mha": {"model_type": "qwen3", "head_dim": 16, "num_key_value_heads": 4},
}


# More experts than a prompt's tokens compute all of, in groups, and time steps at their lower bound; no attention and
# no convolution bias; no Mamba-2.
_BOUNDED = {"time_step_min": 0.05, "time_step_limit": (0.05, float("inf"))}
HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("dense", {}),
    "mixture": ("mixture", {}),
    "latent": ("latent", {}),
    "many-experts": ("mixture", {"n_routed_experts": 16, "n_group": 4, "topk_group": 2, **_BOUNDED}),
    # transformers' cache asks for an attention layer
    "no-attention": ("dense", {"pattern": "M-M", "use_conv_bias": False, "use_cache": False}),
    "no-mamba": ("dense", {"pattern": "*-*-"}),
}


def random_model(family: str, **overrides: Any) -> tuple[Any, Architecture]:
    """A float32 transformers model of FAMILIES or HYBRIDS, and its Architecture."""
    if family in HYBRIDS:
        of, changes = HYBRIDS[family]
        model = hybrid_model(of, **changes)
        return model, Architecture.from_config(model.config.to_dict())
    settings: dict[str, Any] = {
        "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
        "initializer_range": 0.2, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
        **FAMILIES[family], **overrides,
    }  # fmt: skip
    config = AutoConfig.for_model(**settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith(("bias", "norm.weight")):
                    parameter.add_(torch.randn_like(parameter) * 0.2)
    return model, Architecture.from_config(config.to_dict())


def changed_model(family: str) -> Any:
    """With other weights."""
    model, _ = random_model(family)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.mul_(1.1)
    return model


def hub_weights(model: Any) -> dict[str, torch.Tensor]:
    """A model's weights under the hub's names, which are those of its files: of a hybrid, every expert by itself."""
    if model.config.model_type != "nemotron_h":
        return dict(model.state_dict())
    weights: dict[str, torch.Tensor] = {}
    for key, tensor in model.state_dict().items():
        name = f"backbone.{key.removeprefix('model.')}" if key.startswith("model.") else key
        if name.endswith(("experts.up_proj", "experts.down_proj")):
            head, part = name.rsplit(".", 1)
            weights |= {f"{head}.{i}.{part}.weight": expert for i, expert in enumerate(tensor)}
        else:
            weights[name] = tensor
    return weights
