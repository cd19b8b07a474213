"""Running coroutines from plain code."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


def run_on(runner: asyncio.Runner, coroutine: Coroutine[Any, Any, Result]) -> Result:
    """What the coroutine returns, as `runner.run`.

    `Runner.run` takes its Ctrl-C handler back when it ends, and `signal.signal` formats the handler as text, with the
    finished task in it and so the tokens of some of a step's rollouts: 14 ms for 64 groups of 8 with 256 tokens each.
    """
    results: list[Result] = []

    async def keep() -> None:
        results.append(await coroutine)

    runner.run(keep())
    return results[0]
