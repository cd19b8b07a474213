"""What samples: the embedded generator or vLLM, and how rollouts are sampled."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from nemotron_steps.config.schema.grpo import AsyncGrpoConfig
from nemotron_steps.config.schema.policy import GenerationConfig, PolicyConfig
from nemotron_steps.engine.losses.loss import Loss
from nemotron_steps.engine.types import Generator, Policy, SamplingParams, Teachers
from nemotron_steps.engine.weight_sync.transport_handle import ChannelHandles
from nemotron_steps.errors import UnsupportedError
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
    weights: Iterable[tuple[str, torch.Tensor]] | ChannelHandles | None = None,
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
    assert not isinstance(weights, ChannelHandles), "only processes of their own take up offers"
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


def build_policy(config: PolicyConfig, checkpoint: Path, loss_fn: Loss, *, reference: bool, total_steps: int) -> Policy:
    """The trained model in this process (or this rank's part of it)."""
    if config.dtensor_cfg.enabled:
        from nemotron_steps.engine.policy.dtensor import DTensorPolicy

        fsdp: Policy = DTensorPolicy(config, checkpoint, loss_fn, reference=reference, total_steps=total_steps)
        return fsdp
    from nemotron_steps.engine.policy.megatron import MegatronPolicy

    return MegatronPolicy(config, checkpoint, loss_fn, reference=reference, total_steps=total_steps)


def build_teachers(policy: Policy, checkpoints: Mapping[str, Path], *, topk: int | None, offload: bool) -> Teachers:
    """Teachers beside the policy of this process (or rank); arguments as `FrozenTeachers`'s.

    Raises:
        UnsupportedError: the policy is none that compares whole distributions.
    """
    from nemotron_steps.engine.policy.megatron import MegatronPolicy
    from nemotron_steps.engine.policy.teachers import FrozenTeachers

    if not isinstance(policy, MegatronPolicy):
        raise UnsupportedError(
            "only the megatron policy learns from teachers",
            where="policy.dtensor_cfg.enabled",
            hints=("policy.dtensor_cfg.enabled=false",),
        )
    return FrozenTeachers(policy, checkpoints, topk, offload=offload)
