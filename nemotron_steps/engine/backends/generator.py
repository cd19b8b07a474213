"""What samples: the embedded generator or vLLM, and how rollouts are sampled."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from nemotron_steps.config.schema.grpo import AsyncGrpoConfig
from nemotron_steps.config.schema.policy import GenerationConfig
from nemotron_steps.engine.types import Generator, SamplingParams
from nemotron_steps.engine.weight_sync.offers import OfferedWeights
from nemotron_steps.models.chat import ChatFormat

if TYPE_CHECKING:
    import torch


def build_generator(
    hf_folder: Path,
    config: GenerationConfig,
    chat: ChatFormat,
    *,
    max_total_length: int,
    precision: str,
    weights: Iterable[tuple[str, torch.Tensor]] | OfferedWeights | None = None,
    asynchronous: AsyncGrpoConfig | None = None,
    record_routed_experts: bool = False,
) -> Generator:
    """The policy's generator.

    Args:
        hf_folder: has config.json (and tokenizer); weights are read from it when `weights` is None.
        asynchronous: `grpo.async_grpo`, of a policy's generator; None for a judge's.
        record_routed_experts: `policy.router_replay.enabled`.
    """
    overlapping = asynchronous is not None and asynchronous.enabled
    # A generator whose requests may never all be done has no moment for giving memory back; a judge has no policy.
    shares_device = asynchronous is not None and not overlapping and config.colocated.enabled
    if config.backend == "vllm":
        from nemotron_steps.engine.generation.vllm.generator import VllmGenerator

        return VllmGenerator(
            hf_folder,
            config.vllm_cfg,
            max_total_length=max_total_length,
            precision=precision,
            weights=weights,
            # An agent's request may be running whenever the weights change.
            in_flight_updates=config.vllm_cfg.expose_http_server or overlapping,
            recompute_kv_cache=asynchronous is not None and asynchronous.recompute_kv_cache_after_weight_updates,
            shares_device=shares_device,
            record_routed_experts=record_routed_experts,
            options=config.vllm_kwargs,
        )
    assert not isinstance(weights, OfferedWeights), "only processes of their own take up offers"
    import torch

    from nemotron_steps.engine.generation.embedded.generator import EmbeddedGenerator
    from nemotron_steps.models.architecture import Architecture
    from nemotron_steps.models.huggingface import load_hf_weights

    return EmbeddedGenerator(
        Architecture.from_folder(hf_folder),
        weights if weights is not None else load_hf_weights(hf_folder).items(),
        max_sequences=config.max_sequences,
        max_total_length=max_total_length,
        device="cuda" if torch.cuda.is_available() else "cpu",
        dtype=getattr(torch, precision),
        eos_token_ids=chat.end_ids,
        decode=chat.decode,
        recompute_kv_cache=asynchronous is not None and asynchronous.recompute_kv_cache_after_weight_updates,
        record_routed_experts=record_routed_experts,
    )


def sampling_params(config: GenerationConfig, chat: ChatFormat, seed: int | None) -> SamplingParams:
    """How rollouts are sampled; the ends of the chat's turns always stop one."""
    return SamplingParams(
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        stop_token_ids=tuple(dict.fromkeys((*chat.end_ids, *config.stop_token_ids))),
        stop_strings=config.stop_strings,
        seed=seed,
    )
