"""Options of vLLM that `vllm_kwargs` cannot pass through: those with a key of ours, and those that steps depend on."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from nemotron_steps.config.schema.base import Rule, written

if TYPE_CHECKING:
    from nemotron_steps.config.schema.policy import GenerationConfig

RECORDING = "enable_return_routed_experts"
"""vLLM's argument for returning the experts that tokens went through."""
FIXED = frozenset(
    {"distributed_executor_backend", "worker_extension_cls", "logprobs_mode", "load_format", "weight_transfer_config",
     "enable_sleep_mode", "skip_tokenizer_init"}
)  # fmt: skip
"""vLLM's arguments that training and evaluations depend on."""


def own_keys(section: str, seed: str, model: str, generation: str = "generation") -> dict[str, str]:
    """vLLM's argument → the config key that is for it, of a step whose lengths and precision are in `section`."""
    cfg = f"{generation}.vllm_cfg"
    same = ("max_num_seqs", "gpu_memory_utilization", "tensor_parallel_size", "enforce_eager")
    return {
        "model": model,
        "dtype": f"{section}.precision",
        "seed": f"{seed}.seed",
        "max_model_len": f"{section}.max_total_sequence_length",
        "enable_expert_parallel": f"{cfg}.expert_parallel_size",
        **{name: f"{cfg}.{name}" for name in same},
    }


OF_POLICY = {
    **own_keys("policy", "grpo", "policy.checkpoint", "policy.generation"),
    RECORDING: "policy.router_replay.enabled",
}


def option_rules(config: GenerationConfig, section: str, own: Mapping[str, str]) -> Iterator[Rule]:
    """Broken rules of a whole config about its `vllm_kwargs`, at the key `section`; `own` as OF_POLICY. The recording
    of experts where nothing has a key for it is left to vLLM's default."""
    for name, value in config.vllm_kwargs.items() if config.backend == "vllm" else ():
        key, there = f"{section}.vllm_kwargs.{name}", own.get(name)
        if there is not None:
            # Which of several models, and over how many GPUs, is not known.
            plain = isinstance(value, int | float | str) and name not in ("model", "enable_expert_parallel")
            moved = f" {there}={shlex.quote(written(value))}" if plain else ""
            yield Rule(key, f"vLLM's {name} has a key of its own: {there}", f"~{key}{moved}")
        elif name in FIXED or name == RECORDING:
            yield Rule(key, f"vLLM's {name} cannot be changed: the step depends on it", f"~{key}")
