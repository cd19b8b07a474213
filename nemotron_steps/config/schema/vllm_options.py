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


def _own_keys(generation: str, **of_step: str) -> dict[str, str]:
    """vLLM's argument → the config key that is for it: those that every step calls otherwise, and those of vllm_cfg."""
    cfg = f"{generation}.vllm_cfg"
    same = ("max_num_seqs", "gpu_memory_utilization", "tensor_parallel_size", "enforce_eager")
    experts = {"enable_expert_parallel": f"{cfg}.expert_parallel_size"}
    return {**of_step, **{name: f"{cfg}.{name}" for name in same}, **experts}


OF_POLICY = _own_keys(
    "policy.generation",
    model="policy.checkpoint",
    dtype="policy.precision",
    seed="grpo.seed",
    max_model_len="policy.max_total_sequence_length",
    **{RECORDING: "policy.router_replay.enabled"},
)


def of_sampling(section: str, model: str) -> dict[str, str]:
    """The same of a step that trains nothing: of its own section, and the key of what it samples from."""
    return _own_keys(
        "generation",
        model=model,
        dtype=f"{section}.precision",
        seed=f"{section}.seed",
        max_model_len=f"{section}.max_total_sequence_length",
    )


def option_rules(config: GenerationConfig, section: str, own: Mapping[str, str]) -> Iterator[Rule]:
    """Broken rules of a whole config about its `vllm_kwargs`, at the key `section`; `own` as OF_POLICY. The recording
    of experts where nothing has a key for it is left to vLLM's default."""
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
    if name == "dtype" and value not in ("float32", "bfloat16"):
        return None
    if isinstance(value, bool):
        return str(value).lower()
    return shlex.quote(str(value)) if isinstance(value, int | float | str) else None
