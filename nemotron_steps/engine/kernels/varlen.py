"""Rows of unequal length in flat tokens, as attention kernels take them."""

from dataclasses import dataclass, fields
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Range = tuple[int, int]
"""(first, after the last)"""
Moved = TypeVar("Moved")


def size(of: Range) -> int:
    """How many there are in a range."""
    return of[1] - of[0]


@dataclass
class Spans:
    """Consecutive runs of flat tokens."""

    cu_seqlens: Tensor  # int32 [runs + 1], first token of each
    max_seqlen: int


@dataclass
class RowSpans:
    """The rows of a layout as runs: first whole rows (shared prompts first), then suffixes."""

    whole: Spans
    suffix: Spans | None
    first_suffix: Tensor  # int64 [whole rows + 1], on CPU: where each one's suffixes begin
    lengths: Tensor  # int64 [rows], on CPU
    rows: Tensor  # int32 [rows, 6]: triton_attention.FIELDS
    whole_tokens: int
    padding: int  # tokens after the last row

    ON_CPU = ("first_suffix", "lengths")

    @property
    def whole_rows(self) -> int:
        """How many rows continue no other."""
        return len(self.whole.cu_seqlens) - 1

    @property
    def longest(self) -> int:
        """Tokens of the longest row, without its prompt where that is shared."""
        return max(part.max_seqlen for part in (self.whole, self.suffix) if part is not None)


def to_device(of: Moved, device: torch.device) -> Moved:
    """A dataclass of tensors, nested or in tuples, on another device, but for its ON_CPU."""
    if device.type == "cpu":
        return of

    def move(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(device, non_blocking=True)
        if isinstance(value, tuple):
            return tuple(move(each) for each in value)
        return to_device(value, device) if hasattr(value, "__dataclass_fields__") else value

    own: Any = of
    stay = getattr(own, "ON_CPU", ())
    values = {field.name: getattr(own, field.name) for field in fields(own) if field.init}
    made: Moved = type(own)(**{name: value if name in stay else move(value) for name, value in values.items()})
    return made


def pad(tokens: Tensor, source: Tensor | None, cells: Tensor | None) -> Tensor:
    """[tokens, …] → [cells, …], by the token of each cell and the cell of each token."""
    if source is None:
        return tokens
    return _Pad.apply(tokens, source, cells)


def unpad(padded: Tensor, cells: Tensor | None) -> Tensor:
    """The inverse of `pad`. [cells, …] → [tokens, …]."""
    if cells is None:
        return padded
    return _Unpad.apply(padded, cells)


class _Pad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, source: Tensor, cells: Tensor) -> Tensor:
        ctx.save_for_backward(cells)
        return tokens.index_select(0, source)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (cells,) = ctx.saved_tensors
        return grad.index_select(0, cells), None, None


class _Unpad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, padded: Tensor, cells: Tensor) -> Tensor:
        ctx.save_for_backward(cells)
        ctx.count = padded.shape[0]
        return padded.index_select(0, cells)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (cells,) = ctx.saved_tensors
        return grad.new_zeros(ctx.count, *grad.shape[1:]).index_copy_(0, cells, grad), None
