"""config.json of public models, as much of it as memory depends on, and a config's values."""

from typing import Any

NANO_30B: dict[str, Any] = {
    "model_type": "nemotron_h",
    "hidden_size": 2688,
    "intermediate_size": 1856,
    "vocab_size": 131072,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "mamba_num_heads": 64,
    "mamba_head_dim": 64,
    "ssm_state_size": 128,
    "n_groups": 8,
    "conv_kernel": 4,
    "chunk_size": 128,
    "n_routed_experts": 128,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "tie_word_embeddings": False,
}
SUPER_120B: dict[str, Any] = {
    **NANO_30B,
    "hidden_size": 4096,
    "intermediate_size": 2688,
    "hybrid_override_pattern": "MEMEMEM*EMEMEMEM*EMEMEMEM*" + "EMEMEMEMEM*" * 4 + "EMEMEMEM*EMEMEMEME",
    "mamba_num_heads": 128,
    "n_routed_experts": 512,
    "num_experts_per_tok": 22,
    "moe_intermediate_size": 2688,
    "moe_shared_expert_intermediate_size": 5376,
    "moe_latent_size": 1024,
}
NANO_4B: dict[str, Any] = {
    "model_type": "nemotron_h",
    "hidden_size": 3136,
    "intermediate_size": 12544,
    "vocab_size": 131072,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hybrid_override_pattern": "M-M-M-MM-M-M*-M-M*-M-M-M*-M-M-MM*-MMM-M-M-",
    "mamba_num_heads": 96,
    "mamba_head_dim": 80,
    "ssm_state_size": 128,
    "n_groups": 8,
    "conv_kernel": 4,
    "chunk_size": 256,
}
QWEN3_8B: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
}
QWEN3_1_7B: dict[str, Any] = {
    **QWEN3_8B,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "tie_word_embeddings": True,
}
QWEN3_30B_A3B: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "tie_word_embeddings": False,
}


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Every value under its dotted key."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        found[prefix + name] = value
        if isinstance(value, dict):
            found.update(flat(value, f"{prefix}{name}."))
    return found


def on_a_node(values: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Those of a synchronous run on a node of eight GPUs; `__` in a name stands for a dot."""
    return {
        "policy.train_global_batch_size": 64,
        "policy.max_total_sequence_length": 4096,
        "policy.megatron_cfg.activation_checkpointing": True,
        "policy.generation.backend": "vllm",
        "policy.generation.max_new_tokens": 2048,
        "policy.generation.vllm_cfg.gpu_memory_utilization": 0.4,
        "cluster.backend": "ray",
        "cluster.gpus_per_node": 8,
        **values,
        **{name.replace("__", "."): value for name, value in changes.items()},
    }
