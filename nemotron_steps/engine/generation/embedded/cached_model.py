"""What a generator needs of a model: weights under Hugging Face names, a cache, and two ways of feeding tokens.

Shapes: B rows, T tokens, W cache columns in view, D head size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from nemotron_steps.errors import EngineError, UnsupportedError
from nemotron_steps.models.architecture import Architecture


@dataclass
class Slot:
    """Where one named weight goes: the shape it must have, and the view of a fused matrix it is copied into, [..., D,
    X] for head-wise weights."""

    shape: tuple[int, ...]
    view: torch.Tensor
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


class PrefixView(NamedTuple):
    """Prefixes that several rows share, each attended once for up to `m` rows: a grid of P prefixes by m cells, in the
    order (prefix, key-value head, row of the prefix, query head).

    Lists hold one entry a layer: keys [P * key-value heads, D, longest prefix], values with the last two swapped.
    `bias` is an additive mask [P * key-value heads, 1, longest prefix]. Indices, int64: of cells into lanes * (R + 1)
    queries and keys and into lanes * R queries, and of the latter into cells.
    """

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    bias: torch.Tensor
    query_of_cell: torch.Tensor
    row_of_cell: torch.Tensor
    cell_of_row: torch.Tensor


class CacheView(NamedTuple):
    """The part of the KV cache [layers, rows, key-value heads, columns, D] that one decode step of the first B rows
    reads and writes: the window from column `first` to `column`, that of the tokens being fed, with an additive mask
    [lanes, 1, window], and what comes before it."""

    keys: torch.Tensor
    values: torch.Tensor
    first: int
    column: int
    bias: torch.Tensor
    prefix: PrefixView | None
    states: RowStates | None


class DeviceView(NamedTuple):
    """The cache of all rows, for a step that a CUDA graph may capture: what changes between steps is on the device.

    All int64: `column` [1], where the new tokens go; `row_state` [rows, n]: the first column each row holds, the column
    of its position 0, anything else; `prefixes` [rows, PREFIX_FIELDS], 0 tokens for rows that share nothing; `sharing`
    [1 + rows * n]: how many sets of rows read a prefix together, then the rows of each, filled up with -1 to n.
    """

    keys: torch.Tensor
    values: torch.Tensor
    column: torch.Tensor
    row_state: torch.Tensor
    prefixes: torch.Tensor
    sharing: torch.Tensor
    states: RowStates | None


class CachedModel(ABC):
    """Weights and forward pass of one model. `recurrent`: there are layers with states, which cannot be cut as keys and
    values can. `queries_per_lane` query heads share a key-value head. `masked` is added to the score of a hidden key.
    `chosen` is where each mixture leaves the experts [n, k] it chooses in a forward pass; None: not recorded."""

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

    def _named(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A weight that is kept as it comes."""
        weight = torch.empty(shape, device=self.device, dtype=dtype or self.dtype)
        self._slots[name] = Slot.whole(weight)
        return weight

    def _qkv(self, prefix: str, kind: str, *columns: int, interleave: bool = False) -> torch.Tensor:
        """[key-value heads * (R + 2) * D, ...]: each key-value head's queries, its key, its value."""
        lanes, queries, dim = self.architecture.num_key_value_heads, self.queries_per_lane, self.architecture.head_dim
        fused = self._empty(lanes * (queries + 2) * dim, *columns)
        heads = fused.view(lanes, queries + 2, dim, -1)
        for part, view, count in (("q", heads[:, :queries], queries), ("k", heads[:, queries], 1)):
            self._slots[f"{prefix}{part}_proj.{kind}"] = Slot((lanes * count * dim, *columns), view, interleave)
        self._slots[f"{prefix}v_proj.{kind}"] = Slot((lanes * dim, *columns), heads[:, queries + 1])
        return fused

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> int:
        """Copy Hugging Face-named weights in place; return the bytes received. EngineError for names that are unknown
        or missing and wrong shapes; weights may then be partly replaced."""
        missing = set(self._slots)
        received = 0
        self.loads += 1
        for name, tensor in weights:
            received += tensor.numel() * tensor.element_size()
            if name.startswith(self.UNUSED):
                continue
            slot, shape = self._slots.get(name), tuple(tensor.shape)
            if slot is None:
                raise EngineError("a weight has a name that this architecture lacks", found=name)
            if shape != slot.shape:
                what = "a weight has the wrong shape"
                raise EngineError(what, where=name, expected=str(slot.shape), found=str(shape))
            slot.write(tensor.detach())
            missing.discard(name)
        if missing:
            raise EngineError(
                "weights are missing",
                expected=f"all {len(self._slots)} of them",
                found=f"{len(missing)} missing: {', '.join(sorted(missing)[:4])}",
            )
        return received

    def new_cache(self, rows: int, columns: int) -> torch.Tensor:
        """Keys or values [cached layers, rows, key-value heads, columns, D]. Zeros: what the mask hides still meets a
        weight of 0, and 0 times NaN is NaN."""
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
        """Feed one token per row, int64 [B], and write its keys and values to the last column of the window. Logits [B,
        vocabulary] in the model's dtype."""

    @abstractmethod
    def decode_fused(self, tokens: torch.Tensor, cache: DeviceView) -> torch.Tensor:
        """`decode` for CUDA, in few kernels that depend on no number the host knows."""

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
        """Feed T tokens per row, int64 [B, T], left-padded, and write their keys and values to the last columns of the
        cache [cached layers, B, key-value heads, W, D]; `hidden`: bool [B, T, W]. float32 logits [B, vocabulary] of the
        last column."""


@dataclass(frozen=True)
class States:
    """Of sequences that end anywhere, or of one (then without the dimension `sequences`): `ssm` float32 [M, sequences,
    G, N, I / G], state-major, so that one step runs over a group's heads side by side; `window` [M, sequences, k - 1,
    C], the newest input last."""

    ssm: torch.Tensor
    window: torch.Tensor

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
    """What a prefill goes on from: how many tokens of each row, the last ones, are new, and the states before those,
    which are replaced by the ones after them. Attention may be fed tokens that it knows; a state must not."""

    lengths: list[int]
    states: States | None


class LayerStates(NamedTuple):
    """What one decoding step of one layer reads and writes: [B, G, N, I / G], and a ring [k, B, C]."""

    ssm: torch.Tensor
    inputs: torch.Tensor


class RowStates:
    """Of the rows being decoded: `ssm` float32 [M, rows, G, N, I / G], and the inputs of the convolution [M, k, rows,
    C], a ring, so that a step writes one place of it: `newest`, for all rows alike, or `place` on the device."""

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
