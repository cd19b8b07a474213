"""One flat buffer for a model's parameters and one for their gradients, on CPU and CUDA alike.

Parameters become views of the flat buffer, so that zeroing, reducing, clipping and updating are a handful of calls
whatever the number of layers, and a copy of the weights is one tensor. megatron-core has such buffers as well, but
with CUDA devices and streams written into them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from nemotron_steps.engine.policy.parallel_dims import all_gather, reduce_scatter
from nemotron_steps.models.mapping import Parameter

_ALIGNMENT = 64
_PIECE = 2**30
"""torch.dot on CUDA refuses more elements than 31 bits count: a model of 4 B parameters has them in one segment."""


@dataclass(frozen=True, order=True)
class Kind:
    """What parameters of a stretch of the buffer have in common."""

    decayed: bool
    """Weight decay applies: everything but norms and biases."""
    replicated: bool
    """Every tensor-parallel rank holds all of it, so it counts once in the gradient norm."""
    partial: bool
    """Replicated, but each tensor-parallel rank has only its share of the gradient."""
    duplicate: bool = False
    """A second copy of a parameter that another rank already counts (tied embeddings on the last pipeline stage)."""


@dataclass(frozen=True)
class Slot:
    """Where one parameter lies."""

    parameter: Parameter
    tensor: torch.nn.Parameter
    start: int
    end: int


@dataclass(frozen=True)
class Segment:
    """A stretch of parameters of one kind."""

    kind: Kind
    start: int
    end: int


class ParameterBuffer:
    """Flat weights and float32 gradients of parameters that are reduced over the same ranks.

    Args:
        parameters: (what it is, its kind, the tensor) of each; their data moves into the buffer.
        data_group: ranks over which gradients add up.
        tensor_group: tensor-parallel ranks.
        sharded: split the optimizer's work over `data_group` (the distributed optimizer).
    """

    def __init__(
        self,
        parameters: Sequence[tuple[Parameter, Kind, torch.nn.Parameter]],
        data_group: dist.ProcessGroup | None,
        tensor_group: dist.ProcessGroup | None,
        *,
        sharded: bool,
    ) -> None:
        self.data_group, self.tensor_group = data_group, tensor_group
        self.of_experts = parameters[0][0].of_experts
        self.data_size = 1 if data_group is None else dist.get_world_size(data_group)
        self.shards = self.data_size if sharded else 1
        shard_rank = dist.get_rank(data_group) if self.shards > 1 else 0
        ordered = sorted(parameters, key=lambda item: item[1])
        first = ordered[0][2]
        self.slots: list[Slot] = []
        self.segments: list[Segment] = []
        end = 0
        for parameter, kind, tensor in ordered:
            start, end = end, end + tensor.numel()
            self.slots.append(Slot(parameter, tensor, start, end))
            if self.segments and self.segments[-1].kind == kind:
                self.segments[-1] = Segment(kind, self.segments[-1].start, end)
            else:
                self.segments.append(Segment(kind, start, end))
        size = -(-end // (self.shards * _ALIGNMENT)) * self.shards * _ALIGNMENT
        self.values = torch.zeros(size, dtype=first.dtype, device=first.device)
        self.grads = torch.zeros(size, dtype=torch.float32, device=first.device)
        self._grad_bytes = self.grads.untyped_storage().size()
        length = size // self.shards
        self.shard = slice(shard_rank * length, (shard_rank + 1) * length)
        for slot in self.slots:
            view = self.values[slot.start : slot.end].view(slot.tensor.shape)
            view.copy_(slot.tensor.data)
            slot.tensor.data = view
            self._collect_gradient(slot)

    def _collect_gradient(self, slot: Slot) -> None:
        target = self.grads[slot.start : slot.end].view(slot.tensor.shape)
        if slot.tensor.dtype is torch.float32:
            slot.tensor.grad = target  # autograd adds into an existing gradient in place
            return
        if target.is_cuda:
            slot.tensor.main_grad = target  # type: ignore[attr-defined]  # Megatron's name; kernels/dense.py adds into it

        def add(tensor: torch.Tensor) -> None:
            if tensor.grad is not None:
                target.add_(tensor.grad)
                tensor.grad = None

        slot.tensor.register_post_accumulate_grad_hook(add)  # type: ignore[no-untyped-call]

    def start_gradients(self) -> None:
        """Zero gradients, in memory that `release_gradients` may have given back."""
        storage = self.grads.untyped_storage()
        if storage.size() == 0:
            storage.resize_(self._grad_bytes)
        self.grads.zero_()

    def release_gradients(self) -> None:
        """On a GPU, free the gradients: they are of no use until the next batch, and are as large as the weights in
        float32. Views of them stay valid for `start_gradients`."""
        if self.grads.is_cuda:
            self.grads.untyped_storage().resize_(0)

    def own_segments(self, predicate: Callable[[Kind], bool] = lambda _: True) -> list[Segment]:
        """Segments cut to this rank's shard, offsets relative to the whole buffer."""
        found = []
        for segment in self.segments:
            start, end = max(segment.start, self.shard.start), min(segment.end, self.shard.stop)
            if start < end and predicate(segment.kind):
                found.append(Segment(segment.kind, start, end))
        return found

    def reduce_gradients(self) -> None:
        """Add up gradients over the ranks that have parts of them; with shards, only this rank's shard is complete."""
        if self.tensor_group is not None and dist.get_world_size(self.tensor_group) > 1:
            for segment in self.segments:
                if segment.kind.partial:
                    dist.all_reduce(self.grads[segment.start : segment.end], group=self.tensor_group)
        if self.data_size == 1:
            return
        if self.shards > 1 and self.grads.is_cuda:
            reduce_scatter(self.grads[self.shard], self.grads, self.data_group)
        else:
            dist.all_reduce(self.grads, group=self.data_group)

    def gather_values(self) -> None:
        """After an update of this rank's shard: every rank gets every shard."""
        if self.shards > 1:
            all_gather(self.values, self.values[self.shard].clone(), self.data_group)

    def squared_norm(self, *, first_tensor_rank: bool) -> torch.Tensor:
        """This rank's share of the squared gradient norm, a float32 scalar."""
        counted = self.own_segments(lambda kind: not kind.duplicate and (first_tensor_rank or not kind.replicated))
        total = torch.zeros((), dtype=torch.float32, device=self.grads.device)
        for segment in counted:
            total += squared_sum(self.grads[segment.start : segment.end])
        return total

    def point_at(self, values: torch.Tensor) -> None:
        """Make the parameters views of another flat tensor of the same layout."""
        for slot in self.slots:
            slot.tensor.data = values[slot.start : slot.end].view(slot.tensor.shape)

    def unflatten(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Views of a whole flat tensor, by parameter name."""
        return {slot.parameter.name: flat[slot.start : slot.end].view(slot.tensor.shape) for slot in self.slots}


def squared_sum(flat: torch.Tensor) -> torch.Tensor:
    """Of a flat float32 tensor of any length, a scalar."""
    return torch.stack([torch.dot(piece, piece) for piece in torch.split(flat, _PIECE)]).sum()


def gather_shards(buffer: ParameterBuffer, shard: torch.Tensor) -> torch.Tensor:
    """The whole flat tensor of which every data-parallel rank holds its shard."""
    if buffer.shards == 1:
        return shard
    whole = shard.new_empty(shard.numel() * buffer.shards)
    all_gather(whole, shard, buffer.data_group)
    return whole


def is_decayed(tensor: Any) -> bool:
    """Megatron's rule: weight decay for matrices, none for norms and biases."""
    return bool(tensor.dim() > 1)
