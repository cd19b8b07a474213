"""Models with fewer heads than ranks, on two and four ranks: what each rank finds, and gradients of every parameter."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors.torch import save_file

from tests.engine.policy.batches import grouped_batch, rl_loss
from tests.engine.policy.ranks import config_for, gradients

TENSOR = "tensor_model_parallel_size"
CONTEXT = "context_parallel_size"
EXPERT = "expert_model_parallel_size"
SEQUENCE = {"sequence_parallel": True}
SHARDED = {"optimizer": {"use_distributed_optimizer": True}}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "one head": ("qwen3", {"num_key_value_heads": 1}),
    "two heads": ("llama", {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8}),
    "three heads": ("qwen3", {"num_attention_heads": 3, "num_key_value_heads": 3}),
    "six heads": ("qwen3", {"num_attention_heads": 6, "num_key_value_heads": 2}),
    "biases": ("qwen2_tied", {"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 64}),
    "mixture": ("qwen3_moe", {"num_key_value_heads": 1}),
    "hybrid": ("latent", {"num_attention_heads": 2, "num_key_value_heads": 1, "n_groups": 2}),
}
"""Name → its shape in tests/models/checkpoints.py or hybrid_twins.py, and what is different."""
CASES: dict[int, dict[str, dict[str, dict[str, Any]]]] = {
    2: {
        "one head": {
            "tensor": {TENSOR: 2},
            "tensor, sequence": {TENSOR: 2, **SEQUENCE},
            "context": {CONTEXT: 2},
        },
        "three heads": {"context": {CONTEXT: 2}, "context, packed": {CONTEXT: 2}},
    },
    4: {
        "one head": {
            "tensor": {TENSOR: 4},
            "tensor, data": {TENSOR: 2, **SHARDED},
            "tensor, context": {TENSOR: 2, CONTEXT: 2, **SEQUENCE},
            "context, packed": {CONTEXT: 4},
        },
        "two heads": {
            "tensor, sequence": {TENSOR: 4, **SEQUENCE},
            "tensor, packed": {TENSOR: 4, "activation_checkpointing": True},
            "tensor, context": {TENSOR: 2, CONTEXT: 2},
        },
        "three heads": {"context, packed": {CONTEXT: 4}},
        "six heads": {
            "context": {CONTEXT: 4, **SHARDED},
            "context, packed": {CONTEXT: 4, "activation_checkpointing": True},
            "tensor, context": {TENSOR: 2, CONTEXT: 2, **SEQUENCE},
        },
        "biases": {"tensor": {TENSOR: 4}, "tensor, context, packed": {TENSOR: 2, CONTEXT: 2}},
        "mixture": {
            "tensor, expert": {TENSOR: 4, EXPERT: 2, **SEQUENCE},
            "context, expert": {CONTEXT: 4, EXPERT: 2},
        },
        "hybrid": {
            "context, packed": {CONTEXT: 4, EXPERT: 2},
            "tensor, context": {TENSOR: 2, CONTEXT: 2, EXPERT: 2, **SEQUENCE},
        },
    },
}
"""Ranks → model → layouts."""
PACKED = {"sequence_packing": {"enabled": True, "train_mb_tokens": 150, "sequence_length_round": 1}}


def steps(
    folder: Path, megatron: dict[str, Any], batches: Sequence[Any] = (), **changes: Any
) -> tuple[dict[str, Any], dict[str, Any], Any]:
    """What is found in two steps, their weights, the first one's gradients, and the policy."""
    from nemotron_steps.engine.policy.megatron import MegatronPolicy

    policy = MegatronPolicy(config_for(megatron, max_grad_norm=1e9, **changes), folder, rl_loss(), total_steps=10)
    first, second = batches or [grouped_batch(seed) for seed in (0, 1)]
    found = {"before": policy.logprobs(first).tolist(), "metrics": [policy.train_step(first)]}
    tensors = {f"gradient {name}": tensor.clone() for name, tensor in gradients(policy)}
    tensors |= {name: tensor.clone() for name, tensor in policy.weights()}
    found["metrics"].append(policy.train_step(second))
    tensors |= {f"second {name}": tensor.clone() for name, tensor in policy.weights()}
    return found, tensors, policy


def scenarios(ranks: int, folders: dict[str, Path], out: Path) -> dict[str, Any]:
    from nemotron_steps.engine.policy.megatron import MegatronPolicy

    results: dict[str, Any] = {}
    cases = [(model, name, megatron) for model, layouts in CASES[ranks].items() for name, megatron in layouts.items()]
    # Process groups are made whenever the layout changes, which takes longer than training.
    cases.sort(key=lambda case: [case[2].get(size, 1) for size in (TENSOR, CONTEXT, EXPERT)])
    for model, name, megatron in cases:
        case = f"{model}: {name}"
        changes = PACKED if "packed" in name else {"train_micro_batch_size": 5}
        results[case], tensors, policy = steps(folders[model], megatron, **changes)
        policy.save_checkpoint(str(out / case))
        policy.save_model(out / f"{case} as megatron")
        if dist.get_rank() == 0:
            save_file(tensors, out / f"{case}.safetensors")
        results[case]["third"] = [policy.train_step(grouped_batch(2))]
        policy.load_checkpoint(str(out / f"{model} alone"))
        results[case]["third"].append(policy.train_step(grouped_batch(2)))
    for model, name, _ in cases:
        policy = MegatronPolicy(config_for({}, max_grad_norm=1e9), folders[model], rl_loss(), total_steps=10)
        policy.load_checkpoint(str(out / f"{model}: {name}"))
        results[f"{model}: {name}"]["third"].append(policy.train_step(grouped_batch(2)))
    return results
