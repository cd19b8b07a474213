"""What two and four ranks of hybrids find, answered as JSON (see tests/engine/policy/ranks.py)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from tests.engine.policy.batches import grouped_batch, paired, preference_loss, rl_loss
from tests.engine.policy.ranks import config_for, gradients
from tests.engine.policy.routes import some_routes

ALL_TO_ALL = {"expert_model_parallel_size": 2, "tensor_model_parallel_size": 2, "sequence_parallel": True}
DISTRIBUTED = {"optimizer": {"use_distributed_optimizer": True}}
TWO: dict[str, dict[str, dict[str, Any]]] = {
    "dense": {
        "data, distributed optimizer": DISTRIBUTED,
        "tensor": {"tensor_model_parallel_size": 2, "activation_checkpointing": True},
        "pipeline": {"pipeline_model_parallel_size": 2},
        "context": {"context_parallel_size": 2},
    },
    "latent": {
        "data": {},
        "expert, distributed optimizer": {"expert_model_parallel_size": 2, **DISTRIBUTED},
        "expert, tensor, sequence": ALL_TO_ALL,
        "pipeline": {"pipeline_model_parallel_size": 2, **DISTRIBUTED},
        "expert, context": {"expert_model_parallel_size": 2, "context_parallel_size": 2},
    },
    "mixture": {"pipeline": {"pipeline_model_parallel_size": 2}},
    "mtp": {
        "data, distributed optimizer": DISTRIBUTED,
        "expert, tensor, sequence": {**ALL_TO_ALL, "activation_checkpointing": True},
        "pipeline": {"pipeline_model_parallel_size": 2, **DISTRIBUTED},
        "expert, context": {"expert_model_parallel_size": 2, "context_parallel_size": 2},
    },
}
"""Twin → layouts of two ranks. Of latent's stages, ME* and -M, only the first has experts; of mixture's both have."""
PATTERNS = {"dense": "M-M*-", "latent": "ME*-M", "mixture": "ME*-E", "mtp": "ME*-M"}
ALWAYS: dict[str, dict[str, Any]] = {"mtp": {"mtp_num_layers": 2, "mtp_use_repeated_layer": True}}
"""Twin → what it is trained with in every layout, one rank's too."""
FOUR: dict[str, dict[str, dict[str, Any]]] = {
    "dense": {
        "tensor, pipeline": {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
        "pipeline": {"pipeline_model_parallel_size": 4},
        "tensor of four, beyond the key-value heads": {"tensor_model_parallel_size": 4},
    },
    "latent": {
        "expert, tensor, sequence, pipeline": {**ALL_TO_ALL, "pipeline_model_parallel_size": 2},
        "expert of four, distributed optimizer": {"expert_model_parallel_size": 4, **DISTRIBUTED},
        "tensor, sequence, context": {
            "tensor_model_parallel_size": 2,
            "sequence_parallel": True,
            "context_parallel_size": 2,
        },
    },
    "mtp": {"expert, tensor, sequence, pipeline": {**ALL_TO_ALL, "pipeline_model_parallel_size": 2}},
}
RESHARDED = [
    ("dense", "tensor", "pipeline"),
    ("latent", "expert, tensor, sequence", "pipeline"),
    ("latent", "pipeline", "expert, distributed optimizer"),
    ("mtp", "pipeline", "expert, tensor, sequence"),
]
"""(twin, layout a checkpoint is saved in, layout it is loaded in)"""
FSDP = [("dense", "float32"), ("latent", "float32"), ("latent", "bfloat16")]
"""(twin, precision) of the dtensor policy"""
RATE = {"moe_router_bias_update_rate": 1e-3}


def policy_of(folder: Path, megatron: dict[str, Any], loss: Any = None, **changes: Any) -> Any:
    """Balancing, and never clipping."""
    from nemotron_steps.engine.policy.megatron import MegatronPolicy

    megatron = {**megatron, **RATE, **ALWAYS.get(folder.name, {})}
    return MegatronPolicy(config_for(megatron, max_grad_norm=1e9, **changes), folder, loss or rl_loss())


def two_batches() -> list[Any]:
    return [grouped_batch(seed) for seed in range(2)]


def preference_steps(
    folder: Path, megatron: dict[str, Any], batches: Sequence[Any] = (), **changes: Any
) -> list[dict[str, float]]:
    """Metrics of two steps of DPO."""
    policy = policy_of(folder, megatron, preference_loss(), **changes)
    return [policy.train_step(batch) for batch in batches or map(paired, two_batches())]


def steps(
    folder: Path, megatron: dict[str, Any], batches: Sequence[Any] = (), **changes: Any
) -> tuple[dict[str, Any], dict[str, Any], Any]:
    """What is found in two steps, the second with the experts of a generator where there are any, the first one's
    gradients and both one's biases, and the policy."""
    policy = policy_of(folder, megatron, **changes)
    first, second = batches or two_batches()
    found = {"before": policy.logprobs(first).tolist(), "metrics": [policy.train_step(first)]}
    tensors = {name: tensor.clone() for name, tensor in gradients(policy)}
    mixtures = len(policy.architecture.mixtures)
    if mixtures:
        second.routed_experts = some_routes(second, mixtures, 2, 8)
    found["metrics"].append(policy.train_step(second))
    found["after"] = policy.logprobs(first).tolist()
    live = policy.shards.hf_tensors()
    tensors |= {name: tensor.clone() for name, tensor in live if name.endswith("correction_bias")}
    return found, tensors, policy


def fsdp_policy(folder: Path, precision: str, **changes: Any) -> Any:
    """The dtensor policy, which never clips."""
    from nemotron_steps.engine.policy.dtensor import DTensorPolicy

    config = config_for({}, dtensor_cfg={"enabled": True}, precision=precision, max_grad_norm=1e9, **changes)
    return DTensorPolicy(config, folder, rl_loss())


def fsdp_steps(
    folder: Path, precision: str, batches: Sequence[Any] = (), **changes: Any
) -> tuple[dict[str, Any], dict[str, Any], Any]:
    """What is found in two steps of it, the first one's gradients, and the policy. Collective."""
    policy = fsdp_policy(folder, precision, **changes)
    first, second = batches or two_batches()
    found = {"before": policy.logprobs(first).tolist(), "metrics": [policy.train_step(first)]}
    tensors = {}
    for name, parameter in policy.model.hf.named_parameters():
        gradient = parameter.grad
        assert gradient is not None, name
        tensors[name] = (gradient.full_tensor() if isinstance(gradient, DTensor) else gradient).clone()
    found["metrics"].append(policy.train_step(second))
    found["after"] = policy.logprobs(first).tolist()
    return found, tensors, policy


def scenarios(ranks: int, folders: dict[str, Path], out: Path) -> dict[str, Any]:
    """By "twin: layout" what `steps` found; with two ranks, third steps, as well from checkpoints of other layouts."""
    results: dict[str, Any] = {}
    for twin, layouts in (FOUR if ranks == 4 else TWO).items():
        for name, megatron in layouts.items():
            case = f"{twin}: {name}"
            results[case], tensors, policy = steps(folders[twin], megatron, train_micro_batch_size=3)
            if dist.get_rank() == 0:
                save_file(tensors, out / f"{case}.safetensors")
            if ranks == 2 and (twin, name) in {(saved_twin, saved) for saved_twin, saved, _ in RESHARDED}:
                policy.save_checkpoint(str(out / case))
                results[f"{case} →"] = policy.train_step(grouped_batch(2))
    if ranks == 4:
        return results
    for twin, precision in FSDP:
        case = f"{twin}: FSDP2, {precision}"
        results[case], tensors, policy = fsdp_steps(folders[twin], precision, train_micro_batch_size=3)
        if dist.get_rank() == 0:
            save_file(tensors, out / f"{case}.safetensors")
        policy.save_checkpoint(str(out / case))
        again = fsdp_policy(folders[twin], precision, train_micro_batch_size=3)  # bfloat16 rounds others otherwise
        again.load_checkpoint(str(out / case))
        results[f"{case}, third"] = [each.train_step(grouped_batch(2)) for each in (policy, again)]
    for twin, before, after in RESHARDED:
        policy = policy_of(folders[twin], TWO[twin][after])
        policy.load_checkpoint(str(out / f"{twin}: {before}"))
        results[f"{twin}: {before} → {after}"] = policy.train_step(grouped_batch(2))
    for name, megatron in TWO["mtp"].items():
        results[f"{name}, preferences"] = preference_steps(folders["mtp"], megatron, train_micro_batch_size=4)
    for name in ("pipeline", "expert, tensor, sequence"):
        policy = policy_of(folders["mtp"], {**TWO["mtp"][name], "mtp_detach_heads": True})
        results[f"{name}, detached"] = policy.train_step(grouped_batch(0))
        policy = policy_of(folders["latent"], TWO["latent"][name], precision="bfloat16")
        policy.train_step(grouped_batch(0))
        results[f"{name} in bfloat16"] = {key: str(tensor.dtype) for key, tensor in policy.weights()}
    return results
