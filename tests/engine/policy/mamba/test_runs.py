"""Every token of every row has its place in what a scan computes together, and nothing else has."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemotron_steps.engine.policy.mamba.segments import Level, Runs

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=12)


def tokens_of(lengths: list[int]) -> list[list[int]]:
    """The flat tokens of each row."""
    ends = np.cumsum(lengths).tolist()
    return [list(range(end - length, end)) for end, length in zip(ends, lengths, strict=True)]


@given(LENGTHS)
@settings(max_examples=60, deadline=None)
def test_rows_of_like_lengths_lie_in_one_batch_each_once(lengths: list[int]) -> None:
    found = Level(np.array(lengths), slice(0, sum(lengths))).batches(torch.device("cpu"))
    rows, begin, place = found.rows.tolist(), 0, 0
    expected = tokens_of(lengths)
    for count, width in found.shapes:
        cells = found.pad[begin : begin + count * width].view(count, width).tolist()
        filled = found.filled[begin : begin + count * width].view(count, width).tolist()
        for line, real, row in zip(cells, filled, rows[place : place + count], strict=True):
            length = lengths[row]
            assert line == [*expected[row], *[expected[row][-1]] * (width - length)]
            assert real == [1.0] * length + [0.0] * (width - length)
        assert count == 1 or 2 * sum(map(sum, filled)) > count * width
        begin, place = begin + count * width, place + count
    assert (begin, place) == (len(found.pad), len(lengths))
    assert found.pad[found.unpad].tolist() == list(range(sum(lengths)))
    assert bool(found.filled[found.unpad].all())
    assert [rows[found.places[row]] for row in range(len(lengths))] == list(range(len(lengths)))


@given(LENGTHS, st.integers(1, 9), st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_chunks_cut_every_row_and_say_where_it_goes_on(lengths: list[int], width: int, most: int) -> None:
    segments = Runs(lengths).segments(width, most)[0]
    chunks = [(row, tokens[at : at + width]) for row, tokens in enumerate(tokens_of(lengths))
              for at in range(0, len(tokens), width)]  # fmt: skip
    for number, segment in enumerate(segments):
        mine = chunks[number * most : (number + 1) * most]
        rows = sorted({row for row, _ in mine})
        assert segment.count == len(mine)
        assert (segment.tokens.start, segment.tokens.stop) == (mine[0][1][0], mine[-1][1][-1] + 1)
        assert list(range(segment.rows.start, segment.rows.stop)) == rows
        assert segment.row.tolist() == [row - rows[0] for row, _ in mine]
        assert segment.first.tolist() == [[row for row, _ in mine].index(each) for each in rows]
        assert segment.last.tolist() == [max(i for i, (row, _) in enumerate(mine) if row == each) for each in rows]
        whole = [
            token - mine[0][1][0] for _, tokens in mine for token in [*tokens, *[tokens[-1]] * (width - len(tokens))]
        ]
        if segment.pad is None:
            assert all(len(tokens) == width for _, tokens in mine)
        else:
            assert segment.unpad is not None and segment.filled is not None
            assert segment.pad.tolist() == whole
            assert segment.pad[segment.unpad].tolist() == list(range(segment.tokens.stop - segment.tokens.start))
            assert segment.filled.flatten().nonzero().flatten().tolist() == segment.unpad.tolist()
    for before, after in pairwise(segments):
        assert before.goes_on == after.continues == (before.rows.stop - 1 == after.rows.start)
    assert not segments[0].continues and not segments[-1].goes_on
    assert len(segments) == -(-len(chunks) // most)


@given(LENGTHS, st.lists(st.tuples(st.integers(0, 99), st.integers(1, 9)), max_size=5), st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_before_each_row_is_the_end_of_what_it_continues(
    roots: list[int], suffixes: list[tuple[int, int]], taps: int
) -> None:
    parents = [parent % len(roots) for parent, _ in suffixes]
    lengths = [*roots, *(length for _, length in suffixes)]
    runs, rows = Runs(lengths, parents), tokens_of(lengths)
    gaps = runs.gaps(taps)
    window = -1 - torch.arange(len(roots) * taps).view(len(roots), taps)  # what is given before the first rows
    held = torch.full((sum(lengths) + len(lengths) * taps,), 10**6)
    held[gaps.cells] = torch.arange(sum(lengths))
    held[gaps.prompt_cells] = gaps.prompt
    held[gaps.empty_cells] = -1 - gaps.window
    place = 0
    for row, tokens in enumerate(rows):
        if row < len(roots):
            before = window[row].tolist()
        else:
            parent = parents[row - len(roots)]
            before = [*window[parent].tolist(), *rows[parent]]
        assert held[place : place + taps + len(tokens)].tolist() == [*before[-taps:], *tokens]
        assert held[gaps.last[row]].tolist() == [*before, *tokens][-taps:]
        place += taps + len(tokens)
    real = held >= 0
    assert gaps.source[real].tolist() == held[real].tolist()
    assert [part.tolist() for part in runs.cu_seqlens] == [
        np.concatenate([[0], np.cumsum(part)]).tolist() for part in (roots, lengths[len(roots) :]) if part
    ]
