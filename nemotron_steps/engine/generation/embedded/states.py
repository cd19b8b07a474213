"""What Mamba-2 layers remember of a sequence: a matrix a head, and the newest inputs of the convolution.

Unlike keys and values it has one size however long the sequence, and cannot be cut: it is of all tokens so far.

Shapes: M Mamba-2 layers, G groups, N state size, I inner size (heads x head size), C channels and k taps of the
convolution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch


@dataclass(frozen=True)
class States:
    """Of sequences that end anywhere, or of one (then without the dimension `sequences`)."""

    ssm: torch.Tensor
    """float32 [M, sequences, G, N, I / G]: state-major, so that one step runs over a group's heads side by side"""
    window: torch.Tensor
    """[M, sequences, k - 1, C], the newest input last"""

    def of(self, row: int) -> States:
        """Those of one sequence, sharing memory."""
        return States(self.ssm[:, row], self.window[:, row])

    def put(self, row: int, states: States) -> None:
        """Replace those of one sequence."""
        self.ssm[:, row] = states.ssm
        self.window[:, row] = states.window

    @property
    def bytes(self) -> int:
        """Of memory."""
        return self.ssm.nbytes + self.window.nbytes


class Continuation(NamedTuple):
    """What a prefill goes on from. Attention may be fed tokens that it knows; a state must not see one twice."""

    lengths: list[int]
    """How many tokens of each row, the last ones, are new"""
    states: States | None
    """Of all rows before those; replaced by the ones after them. None for models without"""


class LayerStates(NamedTuple):
    """What one decoding step of one layer reads and writes, of the first B rows."""

    ssm: torch.Tensor
    """[B, G, N, I / G]"""
    inputs: torch.Tensor
    """[k, B, C], a ring"""


class RowStates:
    """Of the rows being decoded. The inputs of the convolution lie in a ring, so that a step writes one place of it.

    Attributes:
        ssm: float32 [M, rows, G, N, I / G].
        inputs: [M, k, rows, C].
        newest: where in the ring the next token's inputs go, for all rows alike.
        place: int64 [1], the same, on the device.
    """

    def __init__(self, ssm: torch.Tensor, inputs: torch.Tensor) -> None:
        self.ssm, self.inputs = ssm, inputs
        self.newest = 0
        self.place = torch.zeros(1, dtype=torch.int64, device=ssm.device)
        self._rows = -1
        self._layers: list[LayerStates] = []

    @property
    def bytes(self) -> int:
        """Of memory."""
        return self.ssm.nbytes + self.inputs.nbytes

    def layers(self, rows: int) -> list[LayerStates]:
        """Views of the first rows, one a layer."""
        if rows != self._rows:
            self._rows = rows
            self._layers = [
                LayerStates(ssm.narrow(0, 0, rows), inputs.narrow(1, 0, rows))
                for ssm, inputs in zip(self.ssm.unbind(0), self.inputs.unbind(0), strict=True)
            ]
        return self._layers

    def advance(self) -> None:
        """The inputs of one token have been written for every row."""
        self.newest = (self.newest + 1) % self.inputs.shape[1]

    def put(self, first: int, last: int, states: States) -> None:
        """Rows first to last - 1 have fed the same tokens."""
        self.ssm[:, first:last] = states.ssm.unsqueeze(1)
        taps = self.inputs.shape[1]
        for age in range(1, taps):
            self.inputs[:, (self.newest - age) % taps, first:last] = states.window[:, None, -age]

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy rows over others."""
        source = torch.tensor(sources, device=self.ssm.device)
        target = torch.tensor(targets, device=self.ssm.device)
        self.ssm.index_copy_(1, target, self.ssm.index_select(1, source))
        self.inputs.index_copy_(2, target, self.inputs.index_select(2, source))
