"""The keys that a config.json of each family must have, with sizes that no default is."""

from typing import Any

_DENSE = {
    "vocab_size": 200, "hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 64,
    "max_position_embeddings": 256,
}  # fmt: skip
REQUIRED: dict[str, dict[str, Any]] = {
    "llama": _DENSE,
    "qwen2": _DENSE,
    "qwen3": _DENSE,
    "qwen3_moe": {**_DENSE, "num_local_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "nemotron_h": {
        **{key: value for key, value in _DENSE.items() if key != "num_hidden_layers"},
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention"],
        "n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
        "moe_shared_expert_intermediate_size": 48, "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16,
        "n_groups": 2, "conv_kernel": 3, "chunk_size": 16,
    },
}  # fmt: skip
