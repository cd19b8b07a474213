"""The recurrence of Mamba-2 over flat tokens, as matrix products of chunks (state space duality, arXiv 2405.21060).

    h_t = exp(dt_t · A) h_{t−1} + dt_t · x_t ⊗ B_t,   y_t = h_t C_t + D x_t

Chunks never span two rows, so nothing of one row enters another's arithmetic. dt, A and states are float32 always.
Where rows begin is computed on CPU, once for all layers; no length is ever read back from a GPU.

Shapes: T tokens, H heads of P, G groups of N (heads of a group share B and C); a chunk has Q tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from nemotron_steps.config.families import bounds_time_steps
from nemotron_steps.engine.policy.mamba.libraries import library_for
from nemotron_steps.engine.policy.token_layout import pad, unpad

Ints = npt.NDArray[np.int64]


@dataclass
class Segment:
    """Consecutive chunks that are computed together. K chunks, m rows that have a part in it."""

    tokens: slice
    count: int
    pad: Tensor | None  # int64 [K · width], token of each cell; None without padding
    unpad: Tensor | None  # int64 [tokens], cell of each token
    filled: Tensor | None  # float32 [K, width, 1]: 1 in cells that are tokens
    rows: slice  # the first may have begun earlier, the last end later
    goes_on: bool  # the last row ends in a later segment
    row: Tensor  # int64 [K], row of each chunk, counted from the first
    first: Tensor  # int64 [m], each row's first chunk here
    last: Tensor  # int64 [m], its last


@dataclass
class Gaps:
    """Rows with a gap of `taps` cells before each, for what precedes its first token. All int64."""

    source: Tensor  # [cells], flat token of each; anything where a gap is empty
    cells: Tensor  # [tokens], cell of each
    prompt_cells: Tensor  # cells of gaps that hold tokens of a prompt
    prompt: Tensor  # and which
    empty_cells: Tensor  # cells of gaps that hold nothing, or a given window
    window: Tensor  # and what of it
    last: Tensor  # [rows, taps], cells of the last tokens, the newest last


@dataclass
class Batches:
    """Rows of a level side by side, padded on the right, in batches of rows of like lengths."""

    shapes: list[tuple[int, int]]  # rows and width of each batch
    pad: Tensor  # int64 [cells], token of each
    unpad: Tensor  # int64 [tokens], cell of each
    filled: Tensor  # float32 [cells, 1]: 1 in cells that are tokens
    rows: Tensor  # int64, one batch after the other
    places: Tensor  # int64, where among those each row is


@dataclass
class Level:
    """All runs that begin empty, or all that continue those."""

    lengths: Ints
    tokens: slice

    @property
    def rows(self) -> int:
        """How many."""
        return len(self.lengths)

    def segments(self, width: int, most: int, device: torch.device) -> list[Segment]:
        """Chunks of at most `width` tokens, none of two rows, at most `most` of them in a segment."""
        chunks_of_row = -(-self.lengths // width)
        row = np.repeat(np.arange(self.rows), chunks_of_row)
        within = np.arange(len(row)) - np.repeat(np.cumsum(chunks_of_row) - chunks_of_row, chunks_of_row)
        sizes = np.minimum(self.lengths[row] - within * width, width)
        starts = np.cumsum(sizes) - sizes
        parts = [slice(begin, min(begin + most, len(row))) for begin in range(0, len(row), most)]
        return [self._segment(row, sizes, starts, part, width, device) for part in parts]

    def batches(self, device: torch.device) -> Batches:
        """Fewer than half of the cells of a batch of more than one row are padding."""
        kind = np.ceil(np.log2(self.lengths)).astype(np.int64)
        rows = np.argsort(kind, kind="stable")
        shapes = [(int((kind == k).sum()), int(self.lengths[kind == k].max())) for k in np.unique(kind)]
        width = np.repeat([width for _, width in shapes], [count for count, _ in shapes])
        own, begin = self.lengths[rows], (np.cumsum(self.lengths) - self.lengths)[rows]
        column = np.arange(int(width.sum())) - np.repeat(np.cumsum(width) - width, width)
        real = column < np.repeat(own, width)
        pad = np.repeat(begin, width) + np.minimum(column, np.repeat(own, width) - 1)
        unpad = np.empty(int(own.sum()), np.int64)
        unpad[pad[real]] = np.flatnonzero(real)
        arrays = pad, unpad, real.astype(np.float32)[:, None], rows, np.argsort(rows)
        return Batches(shapes, *(_moved(array, device) for array in arrays))

    def _segment(
        self, row: Ints, sizes: Ints, starts: Ints, chunks: slice, width: int, device: torch.device
    ) -> Segment:
        own, begin, count = sizes[chunks], int(starts[chunks.start]), chunks.stop - chunks.start
        pad = unpad = filled = None
        if (own < width).any():
            columns = np.arange(width)
            real = columns < own[:, None]
            pad = ((starts[chunks] - begin)[:, None] + np.minimum(columns, own[:, None] - 1)).ravel()
            unpad, filled = np.flatnonzero(real), real.astype(np.float32)[:, :, None]
        first_row, last_row = int(row[chunks.start]), int(row[chunks.stop - 1])
        counted = np.bincount(row[chunks] - first_row, minlength=1)
        last = np.cumsum(counted) - 1

        return Segment(
            tokens=slice(begin, begin + int(own.sum())),
            count=count,
            pad=_moved(pad, device),
            unpad=_moved(unpad, device),
            filled=_moved(filled, device),
            rows=slice(first_row, last_row + 1),
            goes_on=chunks.stop < len(row) and int(row[chunks.stop]) == last_row,
            row=_moved(row[chunks] - first_row, device),
            first=_moved(last - counted + 1, device),
            last=_moved(last, device),
        )


def _moved(array: npt.NDArray[Any] | None, device: torch.device) -> Any:
    return None if array is None else torch.from_numpy(array).to(device, non_blocking=True)


class Runs:
    """Sequences in flat tokens: those that begin empty first, then those with `parents`."""

    def __init__(
        self,
        lengths: Sequence[int] | Ints,
        parents: Sequence[int] | Ints = (),
        *,
        padding: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        self.lengths = np.asarray(lengths, dtype=np.int64)
        self.parents = np.asarray(parents, dtype=np.int64)
        self.padding = padding
        self.device = torch.device(device)
        self.roots = len(self.lengths) - len(self.parents)
        assert self.lengths.min(initial=1) > 0, "every run has a token"
        self.tokens = int(self.lengths.sum())
        self._segments: dict[tuple[int, int], list[list[Segment]]] = {}
        self._gaps: dict[int, Gaps] = {}

    @cached_property
    def levels(self) -> list[Level]:
        """Rows that begin empty, and those that continue them, if any."""
        split = int(self.lengths[: self.roots].sum())
        first = Level(self.lengths[: self.roots], slice(0, split))
        return [first, Level(self.lengths[self.roots :], slice(split, self.tokens))] if len(self.parents) else [first]

    @cached_property
    def parent(self) -> Tensor:
        """int64 [rows − roots] on the device."""
        return _moved(self.parents, self.device)

    @cached_property
    def row_of_token(self) -> list[Tensor]:
        """Of each level, int32 [1, tokens] on the device."""
        rows = [np.repeat(np.arange(level.rows, dtype=np.int32), level.lengths)[None] for level in self.levels]
        return [_moved(row, self.device) for row in rows]

    @cached_property
    def batches(self) -> list[Batches]:
        """Of each level."""
        return [level.batches(self.device) for level in self.levels]

    def segments(self, width: int, most: int) -> list[list[Segment]]:
        """Of each level."""
        if (width, most) not in self._segments:
            self._segments[width, most] = [level.segments(width, most, self.device) for level in self.levels]
        return self._segments[width, most]

    def gaps(self, taps: int) -> Gaps:
        """Room for what precedes each row."""
        if taps in self._gaps:
            return self._gaps[taps]
        rows = len(self.lengths)
        ends = np.cumsum(self.lengths)
        # What the gap of each row holds: flat tokens, or −1 − (cell of the first rows' windows).
        sources = -1 - np.arange(rows * taps).reshape(rows, taps)
        for row, parent in enumerate(self.parents.tolist(), self.roots):
            own = min(taps, int(self.lengths[parent]))
            sources[row, taps - own :] = np.arange(ends[parent] - own, ends[parent])
            sources[row, : taps - own] = sources[parent, own:]
        cells = np.arange(self.tokens) + np.repeat(np.arange(1, rows + 1) * taps, self.lengths)
        gap_cells = ((ends - self.lengths)[:, None] + np.arange(rows)[:, None] * taps + np.arange(taps)).ravel()
        last = (ends + np.arange(1, rows + 1) * taps)[:, None] - taps + np.arange(taps)
        flat = sources.ravel()
        whole = np.zeros(self.tokens + rows * taps, np.int64)
        whole[cells], whole[gap_cells] = np.arange(self.tokens), np.maximum(flat, 0)
        arrays = whole, cells, gap_cells[flat >= 0], flat[flat >= 0], gap_cells[flat < 0], -1 - flat[flat < 0], last
        gaps = Gaps(*(_moved(array, self.device) for array in arrays))
        self._gaps[taps] = gaps
        return gaps


def conv(states: Tensor, weight: Tensor, bias: Tensor | None, runs: Runs, window: Tensor | None = None) -> Tensor:
    """silu(bias + Σ_k weight[k] · states[t − K + 1 + k]) of states [T, C], weight [C, 1, K] → [T, C]. window
    [runs.roots, C, K − 1]: what precedes the rows that continue no other, the newest last."""
    taps = weight.shape[2] - 1
    gaps = runs.gaps(taps)
    spread: Tensor = _Spread.apply(states, window, runs, taps)
    run = library_for("convolution", states, _Conv.apply, states.shape[1], weight.shape[2]) or _Conv.apply
    out = unpad(run(spread, weight, bias), gaps.cells)
    return F.pad(out, (0, 0, 0, runs.padding)) if runs.padding else out


def last_window(states: Tensor, runs: Runs, kernel: int, window: Tensor | None = None) -> Tensor:
    """The windows after each row's last token, [rows, C, K − 1], of the inputs of `conv`."""
    gaps = runs.gaps(kernel - 1)
    last = _with_gaps(states, window, runs, kernel - 1)[gaps.last.flatten()]
    return last.view(-1, kernel - 1, states.shape[1]).transpose(1, 2)


def _with_gaps(states: Tensor, window: Tensor | None, runs: Runs, taps: int) -> Tensor:
    gaps = runs.gaps(taps)
    spread = states.index_select(0, gaps.source)
    if window is None:
        return spread.index_fill_(0, gaps.empty_cells, 0)
    given = window.transpose(1, 2).reshape(-1, states.shape[1]).index_select(0, gaps.window)
    return spread.index_copy_(0, gaps.empty_cells, given.to(spread.dtype))


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, window: Tensor | None, runs: Runs, taps: int) -> Tensor:
        ctx.runs, ctx.taps = runs, taps
        ctx.window = None if window is None else (window.shape, window.dtype)
        return _with_gaps(states, window, runs, taps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        runs: Runs = ctx.runs
        gaps = runs.gaps(ctx.taps)
        grad_states = grad.index_select(0, gaps.cells)
        if gaps.prompt.numel():
            grad_states.index_add_(0, gaps.prompt, grad.index_select(0, gaps.prompt_cells))
        if runs.padding:
            grad_states = F.pad(grad_states, (0, 0, 0, runs.padding))
        grad_window = None
        if ctx.needs_input_grad[1]:
            shape, dtype = ctx.window
            flat = grad.new_zeros(shape[0] * ctx.taps, shape[1])
            flat.index_add_(0, gaps.window, grad.index_select(0, gaps.empty_cells))
            grad_window = flat.view(-1, ctx.taps, shape[1]).transpose(1, 2).to(dtype)
        return grad_states, grad_window, None, None


def _before_silu(spread: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    kernel, taps = weight.shape[2], weight[:, 0].float().t()
    spread = spread.float()
    summed = spread * taps[-1] if bias is None else torch.addcmul(bias.float(), spread, taps[-1])
    for back in range(1, kernel):
        summed[back:].addcmul_(spread[:-back], taps[-1 - back])
    return summed


class _Conv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, spread: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(spread, weight, bias)
        return F.silu(_before_silu(spread, weight, bias), inplace=True).to(spread.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        spread, weight, bias = ctx.saved_tensors
        grad = torch.ops.aten.silu_backward(grad.float(), _before_silu(spread, weight, bias))
        kernel, taps, exact = weight.shape[2], weight[:, 0].float().t(), spread.float()
        into = grad * taps[-1]
        grad_taps = [torch.linalg.vecdot(grad, exact, dim=0)]
        for back in range(1, min(kernel, len(grad))):
            into[:-back].addcmul_(grad[back:], taps[-1 - back])
            grad_taps.append(torch.linalg.vecdot(grad[back:], exact[:-back], dim=0))
        grad_taps += [torch.zeros_like(grad_taps[0])] * (kernel - len(grad_taps))
        grad_weight = torch.stack(grad_taps[::-1], 1)[:, None].to(weight.dtype)
        return into.to(spread.dtype), grad_weight, None if bias is None else grad.sum(0).to(bias.dtype)


_MOST_CHUNKS = 64
"""Of a segment: states go from each to each by one product."""
_MOST_SCORES = 2**25
"""Of a segment, [chunks, H, Q, Q]; several segments are computed again."""


def scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor,
    runs: Runs,
    chunk_size: int,
    initial: Tensor | None = None,
    *,
    final: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """y [T, H, P] of the recurrence over every row, and its final states, float32 [rows, H, P, N]. x [T, H, P]; dt
    float32 [T, H], positive; a float32 [H], negative; b, c [T, G, N]; d float32 [H]; initial float32 [runs.roots, H, P,
    N]: states of the rows that continue no other."""
    scan_level = library_for("scan", x, _scan_level, tuple(x.shape[1:]), tuple(b.shape[1:])) or _scan_level
    outs: list[Tensor] = []
    ends: list[Tensor] = []
    for number, level in enumerate(runs.levels):
        parts = [tensor[level.tokens] for tensor in (x, dt, b, c)]
        if number:
            initial = ends[0].index_select(0, runs.parent)
        wanted = final or number < len(runs.levels) - 1
        out, end = scan_level(parts, a, d, runs, number, chunk_size, initial, wanted)
        outs.append(out)
        ends += [] if end is None else [end]
    if runs.padding:
        outs.append(x.new_zeros(runs.padding, *x.shape[1:]))
    return torch.cat(outs) if len(outs) > 1 else outs[0], torch.cat(ends) if final else None


def time_steps(dt: Tensor, dt_bias: Tensor, limit: tuple[float, float]) -> Tensor:
    """What `scan` takes, float32 [T, heads], of what the input projection gave."""
    steps = F.softplus(dt.float() + dt_bias)
    return steps.clamp(*limit) if bounds_time_steps(limit) else steps


def _scan_level(
    tokens: Sequence[Tensor],
    a: Tensor,
    d: Tensor,
    runs: Runs,
    number: int,
    chunk_size: int,
    initial: Tensor | None,
    final: bool,
) -> tuple[Tensor, Tensor | None]:
    level = runs.levels[number]
    width = min(chunk_size, int(level.lengths.max()))
    heads = a.shape[0]
    most = max(1, _MOST_SCORES // (heads * width * width))
    if int(level.lengths.max()) > width or initial is not None:
        most = min(most, _MOST_CHUNKS)
    segments = runs.segments(width, most)[number]
    run: Callable[..., tuple[Tensor, Tensor | None]] = _segment
    if len(segments) > 1 and torch.is_grad_enabled():
        run = partial(checkpoint, _segment, use_reentrant=False, preserve_rng_state=False)
    cuts = [segment.tokens.stop - segment.tokens.start for segment in segments]
    split = [torch.split(tensor, cuts) if len(cuts) > 1 else (tensor,) for tensor in tokens]
    outs: list[Tensor] = []
    ends: list[Tensor] = []
    carried: Tensor | None = None
    for segment, *parts in zip(segments, *split, strict=True):
        # States of its first rows before their first chunks here; None if all are empty.
        entering = carried
        if initial is not None:
            rows = initial[segment.rows]
            entering = rows if carried is None else torch.cat((carried, rows[1:]))
        out, end = run(*parts, a, d, entering, segment, final)
        outs.append(out)
        carried = end[-1:] if end is not None and segment.goes_on else None
        if end is not None and final:
            ends.append(end[:-1] if segment.goes_on else end)
    return torch.cat(outs) if len(outs) > 1 else outs[0], torch.cat(ends) if final else None


def _segment(
    x: Tensor,
    dt: Tensor,
    b: Tensor,
    c: Tensor,
    a: Tensor,
    d: Tensor,
    entering: Tensor | None,
    segment: Segment,
    final: bool,
) -> tuple[Tensor, Tensor | None]:
    """Outputs of a segment's tokens, and states after its rows if needed."""
    count, groups, state = segment.count, b.shape[1], b.shape[2]
    heads, head_dim = x.shape[1:]
    each = heads // groups
    kind = _factors(x)
    values, b, c = (pad(tensor, segment.pad, segment.unpad) for tensor in (x.float(), b.to(kind), c.to(kind)))
    dt = pad(dt, segment.pad, segment.unpad).view(count, -1, heads)
    if segment.filled is not None:
        dt = dt * segment.filled  # cells of padding then leave the state as it is
    width = dt.shape[1]
    # Sums of dt · A up to and with each token, [K, H, Q]. In float64: small differences of large sums are needed.
    logs = (dt * a).transpose(1, 2).cumsum(-1, dtype=torch.float64)
    b, c = (tensor.view(count, width, groups, state).transpose(1, 2) for tensor in (b, c))  # [K, G, Q, N]
    scaled = (values.view(count, width, heads, head_dim) * dt[..., None]).transpose(1, 2)  # [K, H, Q, P]
    scores = torch.matmul(c, b.transpose(2, 3))[:, :, None] * _Decays.apply(logs).view(
        count, groups, each, width, width
    )
    y = torch.matmul(scores.view(count, heads, width, width).to(kind), scaled.to(kind)).float()
    last = logs[:, :, -1]
    needs_states = entering is not None or final or segment.goes_on or len(segment.row) > len(segment.first)
    ends: Tensor | None = None
    if needs_states:
        leaving = (scaled * (last[..., None] - logs).float().exp()[..., None]).to(kind).transpose(2, 3)
        # [K, H, P, N]: what each chunk adds to the state at its end.
        added = torch.matmul(leaving.reshape(count, groups, each * head_dim, width), b).float()
        before, ends = _between_chunks(added.view(count, heads, head_dim, state), last, entering, segment, final)
        if before is not None:
            read = before.to(kind).reshape(count, groups, each * head_dim, state)
            received = torch.matmul(c, read.transpose(2, 3)).view(count, groups, width, each, head_dim)
            y = torch.addcmul(y, received.transpose(2, 3).reshape(y.shape).float(), logs.float().exp()[..., None])
    y = y.transpose(1, 2).reshape(count * width, heads, head_dim)
    y = torch.addcmul(y, values.view_as(y), d[:, None])
    return unpad(y, segment.unpad).to(x.dtype), ends


def _factors(x: Tensor) -> torch.dtype:
    """Type of products' factors; sums, decays and states are float32 everywhere."""
    return x.dtype if x.is_cuda else torch.float32


def _between_chunks(
    added: Tensor, last: Tensor, entering: Tensor | None, segment: Segment, final: bool
) -> tuple[Tensor | None, Tensor | None]:
    """States before each chunk, [K, H, P, N] (None: all empty), and after rows."""
    count, rows = segment.row.shape[0], segment.first.shape[0]
    if entering is None and count == rows:  # no row has more than one chunk
        return None, added if final else added[-1:]
    order = torch.arange(count, device=added.device)
    # Sums over each row's chunks up to this one; each row by itself, since another's sums would round its own.
    up_to = (segment.row[:, None] == segment.row) & (order[:, None] >= order)
    end = up_to.double() @ last
    start = end - last
    to_log, to_row, to_order, from_log, from_row, from_order = start, segment.row, order, end, segment.row, order
    if final or segment.goes_on:
        ends_at = segment.last if final else segment.last[-1:]
        to_log = torch.cat((start, end.index_select(0, ends_at)))
        to_row = torch.cat((segment.row, segment.row.index_select(0, ends_at)))
        to_order = torch.cat((order, torch.full_like(ends_at, count)))
    if entering is not None:
        enters_at = segment.first[: entering.shape[0]]
        from_log = torch.cat((end, start.index_select(0, enters_at)))
        from_row = torch.cat((segment.row, segment.row.index_select(0, enters_at)))
        from_order = torch.cat((order, torch.full_like(enters_at, -1)))
    apart = (to_row[:, None] != from_row) | (to_order[:, None] <= from_order)
    weights = (to_log[:, None] - from_log).masked_fill(apart[..., None], -torch.inf).exp().float().permute(2, 0, 1)
    flat = added.flatten(2).transpose(0, 1)  # [H, K, P · N]
    states = torch.bmm(weights[:, :, :count], flat)
    if entering is not None:
        states = torch.baddbmm(states, weights[:, :, count:], entering.flatten(2).transpose(0, 1))
    states = states.transpose(0, 1).view(-1, *added.shape[1:])
    if to_log is start:
        return states, None
    return states[:count], states[count:]


class _Decays(torch.autograd.Function):
    """exp(log_i − log_j) for j ≤ i, else 0: float64 [..., Q] → float32 [..., Q, Q]."""

    @staticmethod
    def forward(ctx: Any, logs: Tensor) -> Tensor:
        width = logs.shape[-1]
        above = torch.ones(width, width, dtype=torch.bool, device=logs.device).triu_(1)
        # Differences of float64 without matrices of it: each sum is what float32 holds of it, and the rest.
        high = logs.float()
        rest = (logs - high).float()
        decays = high[..., :, None] - high[..., None, :]
        decays.add_(rest[..., :, None]).sub_(rest[..., None, :])
        decays.masked_fill_(above, -torch.inf).exp_()
        ctx.save_for_backward(decays)
        return decays

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (decays,) = ctx.saved_tensors
        product: Tensor = grad * decays
        return product.sum(-1) - product.sum(-2)
