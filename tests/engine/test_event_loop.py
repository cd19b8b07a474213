from __future__ import annotations

import asyncio

import pytest

from nemotron_steps.engine.event_loop import run_on


class Result:
    formatted = 0

    def __repr__(self) -> str:
        Result.formatted += 1
        return "a long text"


async def result() -> Result:
    return Result()


def test_the_result_is_returned_and_never_formatted_as_text() -> None:
    with asyncio.Runner() as runner:
        assert isinstance(run_on(runner, result()), Result)
    assert Result.formatted == 0


def test_errors_are_raised_as_they_are() -> None:
    async def fail() -> None:
        raise LookupError("gone")

    with asyncio.Runner() as runner, pytest.raises(LookupError, match="gone"):
        run_on(runner, fail())
