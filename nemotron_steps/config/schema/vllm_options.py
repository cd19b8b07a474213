"""Options of vLLM that `vllm_kwargs` cannot pass through: those with a key of ours, and those that steps depend on."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from nemotron_steps.config.schema.base import Rule

if TYPE_CHECKING:
    from nemotron_steps.config.schema.policy import GenerationConfig

RECORDING = "enable_return_routed_experts"
"""vLLM's argument for returning the experts that tokens went through."""
FIXED = frozenset(
    {"distributed_executor_backend", "worker_extension_cls", "logprobs_mode", "load_format", "weight_transfer_config",
     "enable_sleep_mode", "skip_tokenizer_init"}
)  # fmt: skip
"""vLLM's arguments that training and evaluations depend on."""
_OF_CFG = {
    "max_num_seqs": "max_num_seqs",
    "gpu_memory_utilization": "gpu_memory_utilization",
    "tensor_parallel_size": "tensor_parallel_size",
    "enable_expert_parallel": "expert_parallel_size",
    "enforce_eager": "enforce_eager",
}
"""vLLM's argument → the key of `vllm_cfg` that is for it."""
_PRECISIONS = ("float32", "bfloat16")


def own_keys(generation: str, of_step: Mapping[str, str]) -> dict[str, str]:
    """vLLM's argument → the config key that is for it.

    Args:
        generation: the key of the generation's section.
        of_step: those that every step calls otherwise.
    """
    return {**of_step, **{name: f"{generation}.vllm_cfg.{key}" for name, key in _OF_CFG.items()}}


OF_POLICY = own_keys(
    "policy.generation",
    {
        "model": "policy.checkpoint",
        "dtype": "policy.precision",
        "seed": "grpo.seed",
        "max_model_len": "policy.max_total_sequence_length",
        RECORDING: "policy.router_replay.enabled",
    },
)


def of_sampling(section: str, model: str) -> dict[str, str]:
    """`own_keys` of a step that trains nothing.

    Args:
        section: its own (`evaluation`). model: the key of what it samples from.
    """
    length = f"{section}.max_total_sequence_length"
    keys = {"model": model, "dtype": f"{section}.precision", "seed": f"{section}.seed", "max_model_len": length}
    return own_keys("generation", keys)


def option_rules(config: GenerationConfig, section: str, own: Mapping[str, str]) -> Iterator[Rule]:
    """Broken rules of a whole config about its `vllm_kwargs`.

    Args:
        section: the key of `config`.
        own: see `own_keys`. The recording of experts where nothing has a key for it is left to vLLM's default.
    """
    if config.backend != "vllm":
        return
    for name, value in config.vllm_kwargs.items():
        key = f"{section}.vllm_kwargs.{name}"
        if name in own:
            same = None if own[name].endswith(".NAME") else _as_own(name, value, config)  # which model is not known
            moved = f"~{key}" if same is None else f"~{key} {own[name]}={same}"
            yield Rule(key, f"vLLM's {name} has a key of its own: {own[name]}", moved)
        elif name in FIXED or name == RECORDING:
            yield Rule(key, f"vLLM's {name} cannot be changed: the step depends on it", f"~{key}")


def _as_own(name: str, value: Any, config: GenerationConfig) -> str | None:
    """A value as the key of ours has it; None for one that ours cannot have."""
    if name == "enable_expert_parallel":
        width = config.vllm_kwargs.get("tensor_parallel_size", config.vllm_cfg.tensor_parallel_size)
        return str(width if value is True else 1)
    if name == "dtype":
        return value if value in _PRECISIONS else None
    if isinstance(value, bool):
        return str(value).lower()
    return shlex.quote(str(value)) if isinstance(value, int | float | str) else None
