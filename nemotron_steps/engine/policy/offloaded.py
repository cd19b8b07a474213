"""Optimizer state that lies partly in host memory and passes through the GPU piece by piece when it is updated.

Megatron keeps the offloaded fraction's whole update on the CPU (`optimizer_cpu_offload`); here only the moments are
there, and the arithmetic stays on the GPU, to the same effect: PCIe carries them both ways at once, which for 4 B
parameters takes about as long as one micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

PIECE = 1 << 24
"""Elements that pass through the device at once."""
_ALIGNMENT = 128


class SplitTensor:
    """A flat tensor whose end is in host memory.

    Args:
        size: elements.
        fraction: share of them in host memory, pinned where the device is a GPU.
        dtype, device: of the rest.
    """

    def __init__(self, size: int, fraction: float, *, dtype: torch.dtype, device: torch.device) -> None:
        kept = -(-int(size * (1 - fraction)) // _ALIGNMENT) * _ALIGNMENT if fraction else size
        self.on_device = torch.zeros(min(kept, size), dtype=dtype, device=device)
        self.on_host = torch.zeros(
            size - self.on_device.numel(), dtype=dtype, pin_memory=device.type == "cuda" and kept < size
        )

    @property
    def dtype(self) -> torch.dtype:
        """Of both parts."""
        return self.on_device.dtype

    def whole(self) -> torch.Tensor:
        """All elements, on the device."""
        if not self.on_host.numel():
            return self.on_device
        return torch.cat([self.on_device, self.on_host.to(self.on_device.device)])

    def copy_(self, values: torch.Tensor) -> None:
        """Replace all elements."""
        kept = self.on_device.numel()
        self.on_device.copy_(values[:kept])
        self.on_host.copy_(values[kept:])


def through_device(
    tensors: Mapping[str, SplitTensor],
    ranges: Sequence[slice],
    update: Callable[[slice, dict[str, torch.Tensor]], None],
) -> None:
    """Update host parts on the device: while one piece is computed, the next comes and the one before goes back.

    Args:
        tensors: alike in size and split; by name.
        ranges: of elements of the whole tensors; what lies on the device is left out.
        update: given a range and its elements on the device, to be changed in place.
    """
    first = next(iter(tensors.values()))
    kept, device = first.on_device.numel(), first.on_device.device
    pieces = [
        slice(start, min(start + PIECE, whole.stop))
        for whole in ranges
        for start in range(max(whole.start, kept), whole.stop, PIECE)
    ]
    if not pieces:
        return
    lanes = [_Lane(tensors, device) for _ in range(min(2, len(pieces)))]
    for number, piece in enumerate(pieces):
        lanes[number % len(lanes)].run(piece, kept, update)
    for lane in lanes:
        lane.finish()


class _Lane:
    """Room for one piece on the device, with a stream that brings pieces and takes them away."""

    def __init__(self, tensors: Mapping[str, SplitTensor], device: torch.device) -> None:
        self._tensors = tensors
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._room = {name: torch.empty(PIECE, dtype=t.dtype, device=device) for name, t in tensors.items()}
        if self._stream is not None:
            # The room may be memory that what has been asked of the device until now is still to use.
            self._stream.wait_stream(torch.cuda.current_stream())

    def run(self, piece: slice, kept: int, update: Callable[[slice, dict[str, torch.Tensor]], None]) -> None:
        length, host = piece.stop - piece.start, slice(piece.start - kept, piece.stop - kept)
        here = {name: room[:length] for name, room in self._room.items()}
        with self._copying():
            for name, tensor in self._tensors.items():
                here[name].copy_(tensor.on_host[host], non_blocking=True)
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        update(piece, here)
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        with self._copying():
            for name, tensor in self._tensors.items():
                tensor.on_host[host].copy_(here[name], non_blocking=True)

    def finish(self) -> None:
        """Host memory holds what was computed."""
        if self._stream is not None:
            self._stream.synchronize()

    def _copying(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
