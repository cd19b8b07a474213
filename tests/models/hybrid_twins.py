"""Tiny random Nemotron-H models, made by transformers: every kind of layer, and nothing equal by being zero or one.

`hybrid_model` makes one in memory, `write_hybrid` a checkpoint folder with a tokenizer. Names:

    dense     M-M*-      Mamba-2, attention, MLP
    mixture   ME*-ME     and experts in two router groups, with a shared one
    latent    ME*-ME     and experts that work in fewer dimensions than the model
    mtp       latent, with the tensors of a multi-token prediction block, which transformers never loads

Sequences longer than 8 positions span several chunks of the scan. 4 attention heads, 2 key-value heads, 8 Mamba heads
in 4 groups, 8 experts.
"""

import json
from pathlib import Path

from nemotron_steps.config.families import NAMES
from tests.models.checkpoints import write_tokenizer

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "ssm_state_size": 16,
    "n_groups": 4,
    "conv_kernel": 4,
    "chunk_size": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 40,
    "routed_scaling_factor": 2.5,
    "max_position_embeddings": 256,
    "vocab_size": 200,
    "initializer_range": 0.2,
    # transformers takes the least time step that weights are drawn for as a bound of every forward pass (but not of
    # its decoding); the Mamba kernels of vLLM and megatron-core, and time_step_limit, have none.
    "time_step_min": 1e-30,
}
TWINS = {
    "dense": ("M-M*-", {}),
    "mixture": ("ME*-ME", {"n_group": 2, "topk_group": 1}),
    "latent": ("ME*-ME", {"moe_latent_size": 32}),
    "mtp": ("ME*-ME", {"moe_latent_size": 32, "num_nextn_predict_layers": 1}),
}


def hybrid_model(name: str, seed: int = 0, pattern: str | None = None, **changes):
    """A random float32 transformers model; `changes` are keys of its config."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    own_pattern, own = TWINS[name]
    layers = [NAMES[letter][0] for letter in pattern or own_pattern]
    settings = {**SIZES, **own, "layers_block_type": layers, **changes}
    config = AutoConfig.for_model("nemotron_h", bos_token_id=1, eos_token_id=2, pad_token_id=0, **settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
            _randomize(key, tensor)
    return model


def write_hybrid(name: str, folder: Path, seed: int = 0, *, old_config: bool = False, **changes) -> None:
    """A Hugging Face checkpoint folder with a tokenizer.

    Args:
        old_config: write config.json as the hub's own code does (`hybrid_override_pattern`), not as transformers 5.
        changes: see `hybrid_model`.
    """
    model = hybrid_model(name, seed, **changes)
    model.save_pretrained(folder)
    write_tokenizer(folder, model.config.vocab_size)
    if model.config.num_nextn_predict_layers:
        _add_mtp(folder, model.config, seed)
    if old_config:
        _write_old_config(folder, model.config)


def _randomize(key, tensor) -> None:
    from torch.nn import init

    if key.endswith("norm.weight") or "norm_f" in key:
        init.normal_(tensor, mean=1.0, std=0.3)
    elif key.endswith("A_log"):
        init.uniform_(tensor, 0.0, 2.5)
    elif key.endswith("dt_bias"):
        init.uniform_(tensor, -5.0, 0.0)
    elif key.endswith(("mixer.D", "conv1d.weight", "conv1d.bias", "e_score_correction_bias")):
        init.normal_(tensor, mean=float(key.endswith("mixer.D")), std=0.3)
    elif key.endswith("gate.weight"):
        init.normal_(tensor, std=0.2)


def _add_mtp(folder: Path, config, seed: int) -> None:
    """The tensors of the hub's multi-token prediction block: those of its layers, and what leads in and out."""
    import torch
    from safetensors.torch import load_file, save_file

    hidden = config.hidden_size
    pattern = config.mtp_hybrid_override_pattern * config.num_nextn_predict_layers
    layers = hybrid_model("dense", seed + 1, pattern=pattern, **_sizes(config)).state_dict()
    weights = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(seed + 2)

    def normal(*shape: int, mean: float = 0.0) -> torch.Tensor:
        return mean + 0.2 * torch.randn(shape, generator=generator)

    for key, tensor in layers.items():
        kind, *rest = key.removeprefix("model.").split(".", 1)
        if kind != "layers":
            continue
        if rest[0].endswith(("experts.up_proj", "experts.down_proj")):
            head, part = rest[0].rsplit(".", 1)
            each = {f"{head}.{number}.{part}.weight": expert for number, expert in enumerate(tensor)}
        else:
            each = {rest[0]: tensor}
        weights.update({f"mtp.layers.{name}": part.contiguous() for name, part in each.items()})
    length = len(config.mtp_hybrid_override_pattern)
    for block in range(config.num_nextn_predict_layers):
        first, last = f"mtp.layers.{block * length}", f"mtp.layers.{(block + 1) * length - 1}"
        weights[f"{first}.enorm.weight"] = normal(hidden, mean=1.0)
        weights[f"{first}.hnorm.weight"] = normal(hidden, mean=1.0)
        weights[f"{first}.eh_proj.weight"] = normal(hidden, 2 * hidden)
        weights[f"{last}.final_layernorm.weight"] = normal(hidden, mean=1.0)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _sizes(config) -> dict[str, object]:
    return {key: getattr(config, key) for key in (*SIZES, "moe_latent_size", "n_group", "topk_group")}


def _write_old_config(folder: Path, config) -> None:
    path = folder / "config.json"
    written = json.loads(path.read_text())
    for key in ("layers_block_type", "mtp_layers_block_type", "transformers_version"):
        del written[key]
    written["hybrid_override_pattern"] = config.hybrid_override_pattern
    written["num_hidden_layers"] = len(config.hybrid_override_pattern)
    written["torch_dtype"] = written.pop("dtype")
    written["time_step_limit"] = [0.0, float("inf")]
    if config.num_nextn_predict_layers:
        written["mtp_hybrid_override_pattern"] = config.mtp_hybrid_override_pattern
    path.write_text(json.dumps(written, indent=2))
