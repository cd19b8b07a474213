"""The parallel layout of a policy."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nemotron_steps.config.layout.constraints import raise_if_violated, violations
from nemotron_steps.config.layout.parallel_config import ParallelConfig
from nemotron_steps.config.schema.policy import MegatronConfig
from nemotron_steps.models.architecture import Architecture
from nemotron_steps.models.megatron_core import ensure_process_group, load_megatron_core


@dataclass(frozen=True)
class ParallelDims:
    """Parallel sizes, under Megatron's names; `data` is what is left of the world."""

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    sequence_parallel: bool = False

    @classmethod
    def from_config(cls, config: MegatronConfig, architecture: Architecture) -> ParallelDims:
        """The layout of `policy.megatron_cfg`; ConfigError where it does not fit the model."""
        sizes = ParallelConfig(
            tensor=config.tensor_model_parallel_size,
            pipeline=config.pipeline_model_parallel_size,
            context=config.context_parallel_size,
            expert=config.expert_model_parallel_size,
            sequence_parallel=config.sequence_parallel,
            mtp_layers=config.mtp_num_layers,
            mtp_repeated=config.mtp_use_repeated_layer,
        )
        raise_if_violated(violations(sizes, architecture.facts))
        return cls(
            tensor=sizes.tensor,
            pipeline=sizes.pipeline,
            context=sizes.context,
            expert=sizes.expert,
            sequence_parallel=sizes.sequence_parallel and sizes.tensor > 1,
        )


def initialize(layout: ParallelDims) -> None:
    """Create megatron-core's process groups; ConfigError when the world does not fit."""
    load_megatron_core()
    ensure_process_group()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import initialize_rng_tracker

    sizes = ParallelConfig(
        tensor=layout.tensor,
        pipeline=layout.pipeline,
        context=layout.context,
        expert=layout.expert,
        backend="ray",
        workers=dist.get_world_size(),
    )
    raise_if_violated(violations(sizes))
    if parallel_state.model_parallel_is_initialized():
        current = (
            parallel_state.get_tensor_model_parallel_world_size(),
            parallel_state.get_pipeline_model_parallel_world_size(),
            parallel_state.get_context_parallel_world_size(),
            parallel_state.get_expert_model_parallel_world_size(),
        )
        if current == (layout.tensor, layout.pipeline, layout.context, layout.expert):
            return
        # Megatron-core only forgets its groups, each of which has threads that wake up a hundred times a second.
        groups = [group for group in parallel_state._global_process_group_list or [] if group is not None]
        parallel_state.destroy_model_parallel()
        for group in groups:
            dist.destroy_process_group(group)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=1,
        create_gloo_process_groups=False,
    )
    # Nothing here draws random numbers (no dropout), and the inference tracker's forks cost nothing.
    initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)


def device() -> torch.device:
    """This rank's device."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def all_gather(whole: Tensor, part: Tensor, group: dist.ProcessGroup | None) -> None:
    """Fill `whole` with every rank's `part`, in rank order."""
    collective = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13
    collective(whole, part, group=group)


def reduce_scatter(part: Tensor, whole: Tensor, group: dist.ProcessGroup | None) -> None:
    """Fill `part` with this rank's share of the sum of every rank's `whole`."""
    collective = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # renamed in torch 2.13
    collective(part, whole, group=group)


class Groups:
    """This rank's process groups, and its place in them."""

    def __init__(self) -> None:
        from megatron.core import parallel_state as state

        self.rank = dist.get_rank()
        self.data, self.data_rank, self.data_size = _placed(state.get_data_parallel_group())
        self.tensor, self.tensor_rank, self.tensor_size = _placed(state.get_tensor_model_parallel_group())
        self.context, self.context_rank, self.context_size = _placed(state.get_context_parallel_group())
        self.pipeline, self.stage, self.stages = _placed(state.get_pipeline_model_parallel_group())
        self.expert, self.expert_rank, self.expert_size = _placed(state.get_expert_model_parallel_group())
        self.expert_gradient, self.expert_gradient_rank, _ = _placed(state.get_expert_data_parallel_group())
        self.gradient: dist.ProcessGroup = state.get_data_parallel_group(with_context_parallel=True)
        self.model: dist.ProcessGroup = state.get_model_parallel_group()
        self.embedding: dist.ProcessGroup = state.get_embedding_group(check_initialized=False)
        self.stage_ranks: dist.ProcessGroup = state.get_tensor_and_data_parallel_group(with_context_parallel=True)

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank embeds tokens."""
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank computes the loss."""
        return self.stage == self.stages - 1

    def barrier(self) -> None:
        """Wait for every rank."""
        if dist.get_world_size() > 1:
            dist.barrier()

    def from_last_stage(self, value: Any) -> Any:
        """A JSON-serialisable value of the last pipeline stage, on every stage. Collective."""
        if self.stages == 1:
            return value
        source = dist.get_process_group_ranks(self.pipeline)[-1]
        text = json.dumps(value).encode() if self.is_last_stage else b""
        length = torch.tensor([len(text)], device=device())
        dist.broadcast(length, source, group=self.pipeline)
        content = torch.zeros(int(length), dtype=torch.uint8, device=device())
        if self.is_last_stage:
            content.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        dist.broadcast(content, source, group=self.pipeline)
        return json.loads(content.cpu().numpy().tobytes())


def _placed(group: dist.ProcessGroup) -> tuple[dist.ProcessGroup, int, int]:
    return group, dist.get_rank(group), dist.get_world_size(group)
