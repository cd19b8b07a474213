"""Which weight lies where in which bucket: agreed between sender and receivers once, for every later transfer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from nemotron_steps.errors import EngineError

BUCKET_BYTES = 256 * 2**20
_ALIGNMENT = 256


@dataclass(frozen=True)
class Entry:
    """One weight in a bucket."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    """Bytes from the beginning of the bucket."""

    @property
    def bytes(self) -> int:
        """Without padding."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class Bucket:
    """Weights that travel together."""

    entries: tuple[Entry, ...]
    bytes: int
    start: int
    """Bytes of all buckets before it."""

    def views(self, buffer: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights as views of a uint8 buffer that begins with this bucket."""
        for entry in self.entries:
            yield entry.name, buffer[entry.start : entry.start + entry.bytes].view(entry.dtype).view(entry.shape)


@dataclass(frozen=True)
class WeightPlan:
    """Every weight of a model, in the policy's order."""

    buckets: tuple[Bucket, ...]

    @classmethod
    def of(cls, weights: Iterable[tuple[str, torch.Tensor]], bucket_bytes: int = BUCKET_BYTES) -> WeightPlan:
        """The plan for these weights. A weight larger than a bucket gets one of its own."""
        buckets: list[Bucket] = []
        entries: list[Entry] = []
        end = total = 0

        def close() -> None:
            nonlocal entries, end, total
            if entries:
                buckets.append(Bucket(tuple(entries), end, total))
            total, entries, end = total + end, [], 0

        for name, tensor in weights:
            size = -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT
            if end + size > bucket_bytes:
                close()
            entries.append(Entry(name, tuple(tensor.shape), tensor.dtype, end))
            end += size
        close()
        return cls(tuple(buckets))

    @property
    def bytes(self) -> int:
        """Of all buckets."""
        return sum(bucket.bytes for bucket in self.buckets)

    @property
    def payload(self) -> int:
        """Bytes of the weights themselves, without padding."""
        return sum(entry.bytes for bucket in self.buckets for entry in bucket.entries)

    @property
    def largest(self) -> int:
        """Bytes of the largest bucket."""
        return max((bucket.bytes for bucket in self.buckets), default=0)

    def fill(self, bucket: Bucket, buffer: torch.Tensor, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Copy the next weights into a uint8 buffer."""
        for name, view in bucket.views(buffer):
            got, tensor = next(weights, ("nothing", view))
            if got != name or tensor.shape != view.shape or tensor.dtype is not view.dtype:
                expected = f"{name} {tuple(view.shape)} {view.dtype}"
                found = f"{got} {tuple(tensor.shape)} {tensor.dtype}"
                raise EngineError("the policy's weights changed between two transfers", expected=expected, found=found)
            view.copy_(tensor.detach())
