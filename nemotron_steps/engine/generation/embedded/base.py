"""What a generator needs of a model: weights under Hugging Face names, a cache, and two ways of feeding tokens.

Not for: how a family computes (model.py, hybrid.py), scheduling or sampling (generator.py).

Shapes: B rows, T tokens, W cache columns in view, D head size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from nemotron_steps.engine.generation.embedded.decode import CacheView
from nemotron_steps.engine.generation.embedded.states import Continuation, RowStates, States
from nemotron_steps.errors import EngineError, UnsupportedError
from nemotron_steps.models.architecture import Architecture


@dataclass
class Slot:
    """Where one named weight goes: the shape it must have, and the view of a fused matrix it is copied into."""

    shape: tuple[int, ...]
    view: torch.Tensor
    """[..., D, X] for head-wise weights, else of `shape`"""
    interleave: bool = False

    @staticmethod
    def whole(tensor: torch.Tensor) -> Slot:
        """A weight that is kept as it comes."""
        return Slot(tuple(tensor.shape), tensor)

    def write(self, source: torch.Tensor) -> None:
        """Copy the weight into its place."""
        heads = source.reshape(-1, *self.view.shape[1:])  # a norm weight becomes one head, copied to all
        if self.interleave:
            half = self.view.shape[-2] // 2
            halves = heads.reshape(*heads.shape[:-2], 2, half, heads.shape[-1])
            self.view.view(*self.view.shape[:-2], half, 2, -1).copy_(halves.transpose(-2, -3))
        else:
            self.view.copy_(heads)


class DeviceView(NamedTuple):
    """The cache of all rows, for a step that a CUDA graph may capture: what changes between steps is on the device."""

    keys: torch.Tensor
    """[cached layers, rows, key-value heads, columns, D]"""
    values: torch.Tensor
    column: torch.Tensor
    """int64 [1], where the new tokens go"""
    row_state: torch.Tensor
    """int64 [rows, n]: the first column each row holds, the column of its position 0, anything else"""
    prefixes: torch.Tensor
    """int64 [rows, graph.PREFIX_FIELDS]; 0 tokens for rows that share nothing"""
    sharing: torch.Tensor
    """int64 [1 + rows * n]: how many sets of rows read a prefix together, then the rows of each set, filled up with -1
    to n = `graph.rows_together`"""
    states: RowStates | None
    """Where the token's convolution inputs go is read from its `place`"""


class CachedModel(ABC):
    """Weights and forward pass of one model.

    Attributes:
        cached_layers: layers that keep keys and values.
        recurrent: whether there are layers with states, which cannot be cut as keys and values can.
        queries_per_lane: query heads that share a key-value head.
        loads: how often weights have been loaded.
        masked: what is added to the score of a hidden key.
    """

    UNUSED: tuple[str, ...] = ()
    """How names of weights begin that are part of the model, but take no part in generation."""

    def __init__(
        self, architecture: Architecture, *, cached_layers: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        if dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise UnsupportedError(
                "the embedded generator computes in 32 or 16 bits",
                expected="float32, bfloat16 or float16",
                found=str(dtype),
                hints=["policy.precision=float32"],
            )
        self.architecture = architecture
        self.cached_layers = cached_layers
        self.recurrent = architecture.mamba is not None
        self.queries_per_lane = architecture.query_heads_per_group
        self.device, self.dtype = device, dtype
        self.loads = 0
        # Finite, so that padding, for which everything is masked, stays finite too.
        self.masked = torch.finfo(torch.float32).min / 2
        self.chosen: list[torch.Tensor] | None = None
        """Where each mixture leaves the experts [n, k] it chooses in a forward pass; None: they are not recorded."""
        self._slots: dict[str, Slot] = {}

    def take_chosen(self) -> torch.Tensor | None:
        """int16 [n, mixtures, k] of the tokens of the last forward pass, on the device."""
        if self.chosen is None:
            return None
        chosen = torch.stack(self.chosen, 1).to(torch.int16)
        self.chosen.clear()
        return chosen

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, device=self.device, dtype=self.dtype)

    def load(self, weights: Iterable[tuple[str, torch.Tensor]], *, some: bool = False) -> int:
        """Copy a complete set of Hugging Face-named weights in place; return the bytes received.

        Args:
            some: the set is not complete, and the other weights stay.

        Raises:
            EngineError: a name is unknown or missing, or a shape is wrong. Weights may then be partly replaced.
        """
        missing = set(self._slots)
        received = 0
        self.loads += 1
        for name, tensor in weights:
            received += tensor.numel() * tensor.element_size()
            if name.startswith(self.UNUSED):
                continue
            slot = self._slots.get(name)
            if slot is None:
                raise EngineError("a weight has a name that this architecture lacks", found=name)
            if tuple(tensor.shape) != slot.shape:
                raise EngineError(
                    "a weight has the wrong shape", where=name, expected=str(slot.shape), found=str(tuple(tensor.shape))
                )
            slot.write(tensor.detach())
            missing.discard(name)
        if missing and not some:
            raise EngineError(
                "weights are missing",
                expected=f"all {len(self._slots)} of them",
                found=f"{len(missing)} missing: {', '.join(sorted(missing)[:4])}",
            )
        return received

    def new_cache(self, rows: int, columns: int) -> torch.Tensor:
        """Keys or values of `rows` sequences, [cached layers, rows, key-value heads, columns, D].

        Zeros, because what the mask hides still meets a weight of 0, and 0 times NaN is NaN.
        """
        a = self.architecture
        shape = (self.cached_layers, rows, a.num_key_value_heads, columns, a.head_dim)
        return torch.zeros(shape, device=self.device, dtype=self.dtype)

    def new_states(self, rows: int) -> States | None:
        """What recurrent layers remember of `rows` sequences before their first token; None without such layers."""
        return None

    def new_row_states(self, rows: int) -> RowStates | None:
        """The same, of rows that will be decoded."""
        return None

    @abstractmethod
    def decode(self, tokens: torch.Tensor, positions: torch.Tensor, cache: CacheView) -> torch.Tensor:
        """Feed one token per row and write its keys and values to the last column of the window.

        Args:
            tokens, positions: int64 [B]

        Returns:
            Logits [B, vocabulary] in the model's dtype.
        """

    @abstractmethod
    def decode_fused(self, tokens: torch.Tensor, cache: DeviceView) -> torch.Tensor:
        """`decode` for CUDA, in few kernels that depend on no number the host knows.

        Args:
            tokens: int64 [B], of rows 0 to B - 1.

        Returns:
            Logits [B, vocabulary] in the model's dtype.
        """

    @abstractmethod
    def prefill(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        hidden: torch.Tensor,
        continuation: Continuation,
    ) -> torch.Tensor:
        """Feed T tokens per row, left-padded, and write their keys and values to the last columns of the cache.

        Args:
            tokens, positions: int64 [B, T]
            keys, values: [cached layers, B, key-value heads, W, D]
            hidden: bool [B, T, W], True where a token must not look.
            continuation: what of the tokens is new, and the states to go on from.

        Returns:
            float32 logits [B, vocabulary] of the last column.
        """
