"""Runs of queries as one call of attention takes them: where each run begins, and which keys it sees."""

from __future__ import annotations

import torch

from nemotron_steps.engine.policy.token_layout import VarlenSegments

PROMPT = (0, 4)
ROWS = [((), PROMPT), ((), (4, 6)), ((PROMPT,), (6, 9)), ((PROMPT,), (9, 14)), ((), (14, 16))]
"""A prompt, a row by itself, two rows that go on from the prompt, and padding."""


def test_a_run_sees_its_prompt_and_its_own_row_up_to_its_last_query():
    part = VarlenSegments(ROWS, ((2, 5), (8, 12)), torch.device("cpu"))
    assert [run.queries for run in part.segments] == [(2, 4), (4, 5), (8, 9), (9, 12)]
    keys = [[0, 1, 2, 3], [4], [0, 1, 2, 3, 6, 7, 8], [0, 1, 2, 3, 9, 10, 11]]
    assert part.keys.tolist() == [key for run in keys for key in run]
    assert [starts.tolist() for starts in part.cu_seqlens] == [[0, 2, 3, 4, 7], [0, 4, 5, 12, 19]]
    assert all(starts.dtype is torch.int32 and starts.is_contiguous() for starts in part.cu_seqlens)
    assert part.max_seqlens == (3, 7)


def test_rows_outside_of_the_ranges_have_no_run():
    part = VarlenSegments(ROWS, ((4, 6), (14, 16)), torch.device("cpu"))
    assert [run.queries for run in part.segments] == [(4, 6), (14, 16)]
    assert part.keys.tolist() == [4, 5, 14, 15] and part.max_seqlens == (2, 2)
