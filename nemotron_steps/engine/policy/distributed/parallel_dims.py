"""The parallel layout of a policy, its process groups, and how micro-batches move through pipeline stages."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
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


def all_gather(whole: Tensor, part: Tensor, group: dist.ProcessGroup) -> None:
    """Fill `whole` with every rank's `part`, in rank order."""
    collective = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13
    collective(whole, part, group=group)


def reduce_scatter(part: Tensor, whole: Tensor, group: dist.ProcessGroup) -> None:
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
        self.sizes = self.tensor_size, self.stages, self.context_size
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

    def from_last_stage(self, value: Any) -> Any:
        """A value of the last pipeline stage, on every stage. Collective."""
        if self.stages == 1:
            return value
        values = [value]
        source = dist.get_process_group_ranks(self.pipeline)[-1]
        dist.broadcast_object_list(values, source, group=self.pipeline, device=device())
        return values[0]


def _placed(group: dist.ProcessGroup) -> tuple[dist.ProcessGroup, int, int]:
    return group, dist.get_rank(group), dist.get_world_size(group)


Forward = Callable[[int, Tensor | None], Tensor]
"""(micro-batch, received hidden states) → those to send on; on the last stage the loss."""
Shape = Callable[[int], tuple[int, ...]]
"""Shape of the hidden states of a micro-batch between stages."""


class Pipeline:
    """This rank's stage: one forward, one backward (PipeDream-flush, arXiv 2006.09503). Every stage plans the same
    micro-batches, so shapes are never sent."""

    def __init__(self, groups: Groups, dtype: torch.dtype, device: torch.device) -> None:
        self._groups, self._dtype, self._device = groups, dtype, device
        ranks = dist.get_process_group_ranks(groups.pipeline)
        self._before = None if groups.is_first_stage else ranks[groups.stage - 1]
        self._after = None if groups.is_last_stage else ranks[groups.stage + 1]

    def infer(self, count: int, forward: Forward, shape: Shape) -> None:
        """Forward only. Call without gradients."""
        for number in range(count):
            (received,) = self._exchange(receive=[(self._before, shape(number))])
            out = forward(number, received)
            self._exchange(send=[(self._after, out)])

    def train(self, count: int, forward: Forward, shape: Shape) -> None:
        """Forward and backward of every micro-batch; gradients accumulate in the parameters."""
        if self._groups.stages == 1:
            for number in range(count):
                forward(number, None).backward()
            return
        in_flight: deque[tuple[int, Tensor | None, Tensor]] = deque()
        ahead = min(self._groups.stages - self._groups.stage - 1, count)

        def run(number: int, received: Tensor | None) -> Tensor:
            if received is not None:
                received.requires_grad_()
            out = forward(number, received)
            in_flight.append((number, received, out))
            return out

        def back(gradient: Tensor | None) -> Tensor | None:
            _, received, out = in_flight.popleft()
            torch.autograd.backward(out, gradient)
            return None if received is None else received.grad

        for number in range(ahead):
            (received,) = self._exchange(receive=[(self._before, shape(number))])
            self._exchange(send=[(self._after, run(number, received))])
        received = None
        if ahead < count:
            (received,) = self._exchange(receive=[(self._before, shape(ahead))])
        for number in range(ahead, count):
            out = run(number, received)
            (gradient,) = self._exchange(send=[(self._after, out)], receive=[(self._after, shape(in_flight[0][0]))])
            gradient = back(gradient)
            coming = [(self._before, shape(number + 1))] if number + 1 < count else []
            arrived = self._exchange(send=[(self._before, gradient)], receive=coming)
            received = arrived[0] if arrived else None
        while in_flight:
            (gradient,) = self._exchange(receive=[(self._after, shape(in_flight[0][0]))])
            self._exchange(send=[(self._before, back(gradient))])

    def _exchange(
        self,
        send: list[tuple[int | None, Tensor | None]] | None = None,
        receive: list[tuple[int | None, tuple[int, ...]]] | None = None,
    ) -> list[Tensor | None]:
        """Send and receive at once, or neighbours would wait for each other."""
        operations: list[dist.P2POp] = []
        buffers: list[Tensor | None] = []
        for peer, tensor in send or []:
            if peer is not None and tensor is not None:
                operations.append(dist.P2POp(dist.isend, tensor.detach().contiguous(), peer, self._groups.pipeline))
        for peer, shape in receive or []:
            buffer = None if peer is None else torch.empty(shape, dtype=self._dtype, device=self._device)
            if buffer is not None:
                operations.append(dist.P2POp(dist.irecv, buffer, peer, self._groups.pipeline))
            buffers.append(buffer)
        if operations:
            for work in dist.batch_isend_irecv(operations):
                work.wait()
        return buffers
