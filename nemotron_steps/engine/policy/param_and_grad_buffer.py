"""One flat buffer for a model's parameters and one for their gradients, on CPU and CUDA alike. Parameters become views,
so that zeroing, reducing, clipping and updating are a handful of calls. Optimizer state may lie partly in host memory
(SplitTensor), and float32 master weights in the space of bfloat16 (split_float32)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from nemotron_steps.engine.policy.distributed.parallel_dims import all_gather, reduce_scatter
from nemotron_steps.models.mapping import Parameter

_BUFFER_ALIGNMENT = 64
_PIECE = 2**30
"""torch.dot on CUDA refuses more elements than 31 bits count."""


@dataclass(frozen=True, order=True)
class Kind:
    """What parameters of a stretch of the buffer have in common."""

    decayed: bool  # everything but norms and biases
    replicated: bool  # every tensor-parallel rank holds all of it: counts once in the norm
    partial: bool  # replicated, but each rank has its share of the gradient
    duplicate: bool = False  # tied embeddings on the last pipeline stage: the first counts them


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
    """Flat weights and float32 gradients of parameters that are reduced over the same ranks."""

    def __init__(
        self,
        parameters: Sequence[tuple[Parameter, Kind, torch.nn.Parameter]],
        data_group: dist.ProcessGroup,
        tensor_group: dist.ProcessGroup | None,
        *,
        sharded: bool,
    ) -> None:
        self.data_group, self.tensor_group = data_group, tensor_group
        self.of_experts = parameters[0][0].of_experts
        self.data_size = dist.get_world_size(data_group)
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
        size = -(-end // (self.shards * _BUFFER_ALIGNMENT)) * self.shards * _BUFFER_ALIGNMENT
        self.values = torch.zeros(size, dtype=first.dtype, device=first.device)
        self.grads = torch.zeros(size, dtype=torch.float32, device=first.device)
        self._grad_bytes = self.grads.untyped_storage().size()
        length = size // self.shards
        self.shard = slice(shard_rank * length, (shard_rank + 1) * length)
        for slot in self.slots:
            view = self.values[slot.start : slot.end].view(slot.tensor.shape)
            view.copy_(slot.tensor.data)
            slot.tensor.data = view
            target = self.grads[slot.start : slot.end].view(slot.tensor.shape)
            if slot.tensor.dtype is torch.float32:
                slot.tensor.grad = target  # autograd adds into an existing gradient in place
                continue
            if target.is_cuda:
                slot.tensor.main_grad = target  # type: ignore[attr-defined]  # Megatron's name; fused.py adds into it
            slot.tensor.register_post_accumulate_grad_hook(partial(_move_gradient, target))

    def start_gradients(self) -> None:
        """Zero gradients, in memory that `release_gradients` may have given back."""
        storage = self.grads.untyped_storage()
        if storage.size() == 0:
            storage.resize_(self._grad_bytes)
        self.grads.zero_()

    def release_gradients(self) -> None:
        """On a GPU, free the gradients, as large as weights in float32; views stay valid."""
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
        """Add up gradients over the ranks that have parts of them."""
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

    def squared_norm(self) -> Tensor:
        """This rank's share of the squared gradient norm, a float32 scalar."""
        first = self.tensor_group is None or dist.get_rank(self.tensor_group) == 0
        counted = self.own_segments(lambda kind: not kind.duplicate and (first or not kind.replicated))
        total = torch.zeros((), dtype=torch.float32, device=self.grads.device)
        for segment in counted:
            total += squared_sum(self.grads[segment.start : segment.end])
        return total

    def point_at(self, values: Tensor) -> None:
        """Make the parameters views of another flat tensor of the same layout."""
        for slot in self.slots:
            slot.tensor.data = values[slot.start : slot.end].view(slot.tensor.shape)

    def unflatten(self, flat: Tensor) -> dict[str, Tensor]:
        """Views of a whole flat tensor, by parameter name."""
        return {slot.parameter.name: flat[slot.start : slot.end].view(slot.tensor.shape) for slot in self.slots}


def _move_gradient(target: Tensor, tensor: Tensor) -> None:
    if tensor.grad is not None:
        target.add_(tensor.grad)
        tensor.grad = None


def squared_sum(flat: Tensor) -> Tensor:
    """Of a flat float32 tensor of any length, a scalar."""
    return torch.stack([torch.dot(piece, piece) for piece in torch.split(flat, _PIECE)]).sum()


def gather_shards(buffer: ParameterBuffer, shard: Tensor) -> Tensor:
    """The whole flat tensor of which every data-parallel rank holds its shard."""
    if buffer.shards == 1:
        return shard
    whole = shard.new_empty(shard.numel() * buffer.shards)
    all_gather(whole, shard, buffer.data_group)
    return whole


PIECE = 1 << 24
_SPLIT_ALIGNMENT = 128


class SplitTensor:
    """A flat tensor of which a `fraction`, its end, is in host memory."""

    def __init__(self, size: int, fraction: float, *, dtype: torch.dtype, device: torch.device) -> None:
        kept = -(-int(size * (1 - fraction)) // _SPLIT_ALIGNMENT) * _SPLIT_ALIGNMENT if fraction else size
        self.on_device = torch.zeros(min(kept, size), dtype=dtype, device=device)
        self.on_host = torch.zeros(
            size - self.on_device.numel(), dtype=dtype, pin_memory=device.type == "cuda" and kept < size
        )

    @property
    def dtype(self) -> torch.dtype:
        """Of both parts."""
        return self.on_device.dtype

    def whole(self) -> Tensor:
        """All elements, on the device."""
        if not self.on_host.numel():
            return self.on_device
        return torch.cat([self.on_device, self.on_host.to(self.on_device.device)])

    def copy_(self, values: Tensor) -> None:
        """Replace all elements."""
        kept = self.on_device.numel()
        self.on_device.copy_(values[:kept])
        self.on_host.copy_(values[kept:])


def through_device(
    tensors: Mapping[str, SplitTensor], ranges: Sequence[slice], update: Callable[[slice, dict[str, Tensor]], None]
) -> None:
    """Update host parts on the device, piece by piece."""
    first = next(iter(tensors.values()))
    kept, device = first.on_device.numel(), first.on_device.device
    for whole in ranges:
        for start in range(max(whole.start, kept), whole.stop, PIECE):
            piece = slice(start, min(start + PIECE, whole.stop))
            host = slice(piece.start - kept, piece.stop - kept)
            here = {name: t.on_host[host].to(device, non_blocking=True, copy=True) for name, t in tensors.items()}
            update(piece, here)
            for name, tensor in tensors.items():
                tensor.on_host[host].copy_(here[name], non_blocking=True)
    if device.type == "cuda" and first.on_host.numel():
        torch.cuda.current_stream(device).synchronize()


def split_float32(master: Tensor) -> tuple[Tensor, Tensor]:
    """float32 → (bfloat16 weights, int16 remainders), both of its shape."""
    bits = master.contiguous().view(torch.int32)
    weights = ((bits + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)
    return weights, bits.to(torch.int16)  # the low half, as a signed number


def join_float32(weights: Tensor, remainders: Tensor) -> Tensor:
    """The inverse of `split_float32`."""
    high = weights.contiguous().view(torch.int16).to(torch.int32) << 16
    return (high + remainders.to(torch.int32)).view(torch.float32)
