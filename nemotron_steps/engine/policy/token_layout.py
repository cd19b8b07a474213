"""The sequences of a micro-batch as flat tokens, without padding and repeated prompts.

Only attention and scans need to know which token belongs where:

    whole rows   causal attention within each row: unshared sequences, and shared prompts
    suffixes     the rest of a sequence whose prompt is shared: attends to that prompt, then causally to itself
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import pairwise, product
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from nemotron_steps.engine.types import TrainBatch

if TYPE_CHECKING:
    from nemotron_steps.engine.policy.mamba.scan import Runs

Ints = npt.NDArray[np.int64]
Range = tuple[int, int]
"""(first, after the last)"""
Moved = TypeVar("Moved")


def size(of: Range) -> int:
    """How many there are in a range."""
    return of[1] - of[0]


@dataclass
class Grid:
    """Consecutive rows of flat tokens, and how they are laid out as [rows, width]."""

    rows: int
    width: int
    cu_seqlens: Tensor  # int32 [rows + 1], first token of each
    pad: Tensor | None  # int64 [rows · width], token of each cell; None without padding
    unpad: Tensor | None  # int64 [tokens], cell of each
    valid: Tensor | None  # bool [rows, width]


@dataclass
class Ahead:
    """What one depth of multi-token prediction reads and predicts."""

    token_ids: Tensor  # int64 [T], the token so many places after each, or 0
    source: Tensor  # int64 [R], flat token that predicts each trained token
    targets: Tensor  # int64 [R]
    cells: Tensor  # int64 [R], in the flattened [n, W] batch


Row = tuple[tuple[Range, ...], Range]
"""Its prompt, if that is shared; its own tokens."""


class Segment(NamedTuple):
    """Consecutive queries of one sequence, and the ranges that the last of them sees."""

    queries: Range
    keys: tuple[Range, ...]


class VarlenSegments:
    """The queries in ascending ranges of the flat tokens, and which keys they see. The last query of a segment sees all
    its keys, each one before it one less: a causal mask aligned at its end."""

    def __init__(self, rows: Sequence[Row], ranges: Iterable[Range], device: torch.device) -> None:
        self.segments: list[Segment] = []
        for (first, after), (prompt, (start, end)) in product(ranges, rows):
            queries = max(first, start), min(after, end)
            if queries[0] < queries[1]:
                self.segments.append(Segment(queries, (*prompt, (start, queries[1]))))
        counts = [(size(segment.queries), sum(map(size, segment.keys))) for segment in self.segments]
        bounds = torch.tensor([(0, 0), *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32).t().contiguous()
        self.cu_seqlens = bounds.to(device).unbind()  # where a segment's queries begin and where its keys do
        self.max_seqlens = tuple(map(max, zip(*counts, strict=True)))
        keys = [torch.arange(*each) for segment in self.segments for each in segment.keys]
        self.keys = torch.cat(keys).to(device)  # that each segment sees, one segment after another


@dataclass
class TokenLayout:
    """One micro-batch as flat tokens. T tokens, R trained tokens, n sequences of at most W tokens. Rows are the whole
    ones, shared prompts first, then suffixes, then padding."""

    ON_CPU = ("first_suffix", "lengths")

    token_ids: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]
    whole: Grid
    suffix: Grid | None  # None when no prompt is shared
    parent: Tensor | None  # int64 [suffix rows], the whole row each continues
    source: Tensor  # int64 [R], flat token that predicts each trained token
    targets: Tensor  # int64 [R]
    cells: Tensor  # int64 [R], in the flattened [n, W] batch
    shape: tuple[int, int]  # (n, W)
    whole_tokens: int
    padding: int  # tokens added at the end; they belong to no row
    first_suffix: Tensor  # int64 [whole rows + 1], on CPU: where each one's suffixes begin
    lengths: Tensor  # int64 [rows], on CPU
    rows: Tensor  # int32 [rows, 6]: triton_attention.FIELDS
    carried: tuple[Range, ...] = ()  # flat tokens of further sequences, that need none of their own
    routed_experts: Tensor | None = None  # int16 [T, mixtures, k], -1: none; None: not replayed
    ahead: tuple[Ahead, ...] = ()
    idle: bool = False  # computed again only to keep step with other ranks
    runs: Runs | None = field(default=None, repr=False, init=False)  # what recurrent layers know of it
    _parts: dict[tuple[Range, ...], VarlenSegments] = field(default_factory=dict, repr=False, init=False)

    @cached_property
    def mask(self) -> Tensor:
        """bool [suffix rows, 1, suffix width, prompt width + suffix width]."""
        assert self.suffix is not None and self.parent is not None
        rows, width, before = self.suffix.rows, self.suffix.width, self.whole.width
        own = torch.ones(width, width, dtype=torch.bool, device=self.parent.device).tril_().expand(rows, -1, -1)
        if self.whole.valid is None:
            prompt = own.new_ones(rows, width, before)
        else:
            prompt = self.whole.valid[self.parent][:, None, :].expand(rows, width, before)
        return torch.cat((prompt, own), dim=2)[:, None]

    @cached_property
    def occurrences(self) -> Tensor:
        """float32 [T], in how many of the n sequences each token is."""
        device, total = self.token_ids.device, self.token_ids.shape[0]
        counts = torch.ones(total, device=device)
        counts[total - self.padding :] = 0
        rows = self.first_suffix.diff().clamp(min=1).float().to(device)
        lengths = self.whole.cu_seqlens.diff().long()
        counts[: self.whole_tokens] = rows.repeat_interleave(lengths, output_size=self.whole_tokens)
        for first, after in self.carried:
            counts[first:after] += 1
        return counts.zero_() if self.idle else counts

    def part(self, ranges: tuple[Range, ...]) -> VarlenSegments:
        """The queries in ascending ranges of the T tokens; padding is a sequence of its own."""
        if ranges not in self._parts:
            bounds = [0, *self.lengths.cumsum(0).tolist()]
            own = list(pairwise(bounds))
            parents = torch.repeat_interleave(self.first_suffix.diff()).tolist()
            rows: list[Row] = [((), row) for row in own[: len(own) - len(parents)]]
            rows += [((own[parent],), row) for parent, row in zip(parents, own[len(rows) :], strict=True)]
            rows.append(((), (bounds[-1], self.token_ids.shape[0])))
            self._parts[ranges] = VarlenSegments(rows, ranges, self.token_ids.device)
        return self._parts[ranges]


def build_layout(
    batch: TrainBatch, rows: Sequence[int], *, share_prompts: bool = True, divisible_by: int = 1, ahead: int = 0
) -> TokenLayout:
    """Flatten some rows of a batch, on CPU. share_prompts: compute a prompt (what precedes the first trained token)
    that several rows begin with only once; divisible_by: pad T to a multiple of this; ahead: depths of multi-token
    prediction; so many last tokens of a shared prompt are each sequence's own."""
    index = np.asarray(rows, dtype=np.int64)
    ids, lengths, trained = _needed(batch, index)
    width = ids.shape[1]
    prompt = np.where(trained.any(axis=1), trained.argmax(axis=1), lengths)
    shared = np.maximum(prompt - ahead, 0)
    contents = [prompt_content(batch, row, int(tokens)) for row, tokens in zip(index, prompt, strict=True)]
    parents, parent_of, carrier = _shared_prompts(contents if share_prompts else [], shared, lengths, trained)
    alone = [row for row in range(len(index)) if row not in parent_of and row not in carrier]
    # Whole rows: each shared prompt once (from its first rollout), then every unshared sequence.
    whole_rows = np.asarray([*parents, *alone], dtype=np.int64)
    whole_lengths = np.concatenate([shared[whole_rows[: len(parents)]], lengths[whole_rows[len(parents) :]]])
    whole_starts = _starts(whole_lengths)
    total_whole = int(whole_lengths.sum())
    suffix_rows = np.asarray(sorted(parent_of, key=lambda row: (parent_of[row], row)), dtype=np.int64)
    suffix_parents = np.asarray([parent_of[row] for row in suffix_rows], dtype=np.int64)
    suffix_lengths = lengths[suffix_rows] - shared[suffix_rows]
    suffix_starts = total_whole + _starts(suffix_lengths)
    total = total_whole + int(suffix_lengths.sum())

    # Token t of row r is at head[r] + t below split[r], at tail[r] + t from there on.
    head, tail, split = np.zeros(len(index), np.int64), np.zeros(len(index), np.int64), lengths.copy()
    head[alone] = whole_starts[len(parents) :]
    head[suffix_rows] = whole_starts[suffix_parents]
    split[suffix_rows] = shared[suffix_rows]
    tail[suffix_rows] = suffix_starts - shared[suffix_rows]
    for row, carried_by in carrier.items():
        head[row] = head[carried_by]
    row_of, column = np.nonzero(trained)

    def places(row: Ints, column: Ints) -> Ints:
        return np.where(column < split[row], head[row], tail[row]) + column

    cell_row = np.repeat(np.concatenate([whole_rows, suffix_rows]), np.concatenate([whole_lengths, suffix_lengths]))
    positions = np.concatenate(
        [_ramp(whole_lengths), _ramp(suffix_lengths) + np.repeat(shared[suffix_rows], suffix_lengths)]
    )
    padding = -total % divisible_by
    flat_ids = np.pad(ids[cell_row, positions], (0, padding))
    depths = []
    for depth in range(1, ahead + 1):
        place = positions + depth
        inside = place <= lengths[cell_row]  # at `lengths` is the last trained token
        following = np.where(inside, ids[cell_row, np.minimum(place, width - 1)], 0)
        far = column > depth
        of, to = row_of[far], column[far]
        reading = np.pad(following, (0, padding)), places(of, to - depth - 1), ids[of, to], of * width + to
        depths.append(Ahead(*map(torch.from_numpy, reading)))
    routed = None
    if batch.routed_experts is not None:
        chosen = batch.routed_experts[torch.from_numpy(index[cell_row]), torch.from_numpy(positions)]
        routed = F.pad(chosen, (0, 0, 0, 0, 0, padding), value=-1)
    first_suffix = np.zeros(len(whole_lengths) + 1, np.int64)
    np.cumsum(np.bincount(suffix_parents, minlength=len(whole_lengths)), out=first_suffix[1:])
    return TokenLayout(
        token_ids=torch.from_numpy(flat_ids),
        positions=torch.from_numpy(np.pad(positions, (0, padding))),
        whole=_grid(whole_lengths),
        suffix=_grid(suffix_lengths) if len(suffix_rows) else None,
        parent=torch.from_numpy(suffix_parents) if len(suffix_rows) else None,
        source=torch.from_numpy(places(row_of, column - 1)),
        targets=torch.from_numpy(ids[row_of, column]),
        cells=torch.from_numpy(row_of * width + column),
        shape=(len(index), width),
        whole_tokens=total_whole,
        padding=padding,
        first_suffix=torch.from_numpy(first_suffix),
        lengths=torch.from_numpy(np.concatenate([whole_lengths, suffix_lengths])),
        rows=_row_fields(whole_lengths, suffix_lengths, suffix_parents, first_suffix),
        carried=tuple((int(head[row]), int(head[row] + lengths[row])) for row in carrier),
        routed_experts=routed,
        ahead=tuple(depths),
    )


def _needed(batch: TrainBatch, index: Ints) -> tuple[Ints, Ints, npt.NDArray[np.bool_]]:
    """Token ids [n, W], lengths up to the last trained token, and which are trained."""
    ids = batch.input_ids.numpy()[index]
    lengths = np.maximum(batch.lengths.numpy()[index].astype(np.int64), 1)
    trained = batch.token_mask.numpy()[index] > 0
    trained[:, 0] = False
    width = int(lengths.max())
    ids, trained = ids[:, :width], trained[:, :width]
    trained &= np.arange(width) < lengths[:, None]
    return ids, np.where(trained.any(axis=1), width - 1 - trained[:, ::-1].argmax(axis=1), 1), trained


def _row_fields(whole_lengths: Ints, suffix_lengths: Ints, suffix_parents: Ints, first_suffix: Ints) -> Tensor:
    """int32 [rows, 6] for our attention kernels."""
    lengths, wholes = np.concatenate([whole_lengths, suffix_lengths]), len(whole_lengths)
    starts = _starts(lengths)
    rows = np.zeros((len(lengths), 6), np.int32)
    rows[:, 0], rows[:, 1] = starts, lengths
    rows[wholes:, 2:4] = rows[suffix_parents, :2]
    bounds = np.append(starts, lengths.sum())[wholes:][first_suffix]
    rows[:wholes, 4], rows[:wholes, 5] = bounds[:-1], bounds[1:]
    return torch.from_numpy(rows)


def prompt_content(batch: TrainBatch, row: int, tokens: int) -> bytes:
    """What rows must have in common to be computed once."""
    content = batch.input_ids[row, :tokens].numpy().tobytes()
    return content if batch.routed_experts is None else content + batch.routed_experts[row, :tokens].numpy().tobytes()


def _shared_prompts(
    contents: Sequence[bytes], shared: Ints, lengths: Ints, trained: npt.NDArray[np.bool_]
) -> tuple[list[int], dict[int, int], dict[int, int]]:
    """Rows that shared prompts are taken from, rows with a suffix → number of their prompt, rows → their carrier. A row
    whose answer is one token is predicted from the prompt's end, where another row has that prompt."""
    by_prompt: dict[bytes, list[int]] = {}
    for row, content in enumerate(contents):
        if shared[row] > 0 and trained[row].any():
            by_prompt.setdefault(content, []).append(row)
    parents: list[int] = []
    parent_of: dict[int, int] = {}
    carrier: dict[int, int] = {}
    for sharing in by_prompt.values():
        longer = [row for row in sharing if lengths[row] > shared[row]]
        if len(longer) > 1:
            parent_of.update(dict.fromkeys(longer, len(parents)))
            parents.append(longer[0])
        carries = longer[0] if longer else sharing[0]
        carrier.update({row: carries for row in sharing if row != carries and row not in longer})
    return parents, parent_of, carrier


def _starts(lengths: Ints) -> Ints:
    starts = np.zeros(len(lengths), np.int64)
    np.cumsum(lengths[:-1], out=starts[1:])
    return starts


def _ramp(lengths: Ints) -> Ints:
    return np.arange(int(lengths.sum()), dtype=np.int64) - np.repeat(_starts(lengths), lengths)


def _grid(lengths: Ints) -> Grid:
    rows, width = len(lengths), int(lengths.max())
    cu_seqlens = torch.from_numpy(np.append(_starts(lengths), lengths.sum()).astype(np.int32))
    if (lengths == width).all():
        return Grid(rows, width, cu_seqlens, None, None, None)
    columns = np.arange(width)
    valid = columns < lengths[:, None]
    pad = _starts(lengths)[:, None] + np.minimum(columns, lengths[:, None] - 1)
    unpad = torch.from_numpy(np.flatnonzero(valid))
    return Grid(rows, width, cu_seqlens, torch.from_numpy(pad.ravel()), unpad, torch.from_numpy(valid))


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
