"""Running a process under a clock and an output limit, without a sandbox around it."""

from __future__ import annotations

import asyncio
import select
import sys

import pytest

from nemotron_steps.sandbox import Outcome, process
from nemotron_steps.sandbox.process import run_process


def test_output_beyond_the_limit_counts_also_where_the_programs_end_is_seen_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its last words are still in the pipe then."""

    def end_first(run: process._Run) -> Outcome:
        assert select.select([run._pidfd], [], [], 30)[0]
        return Outcome.EXITED

    monkeypatch.setattr(process._Run, "until_over", end_first)
    for written, outcome in ((10, Outcome.EXITED), (11, Outcome.OUTPUT_LIMIT)):
        program = [sys.executable, "-c", f"import sys; sys.stdout.write('x' * {written})"]
        ended = asyncio.run(run_process(program, b"", wall_s=30, output_bytes=10))
        assert (ended.outcome, ended.stdout) == (outcome, "x" * 10)
