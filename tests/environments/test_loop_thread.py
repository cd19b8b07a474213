"""A loop of its own: what still runs there is cancelled at its end, then the last word is said."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest

from nemotron_steps.environments.loop_thread import LoopThread


@pytest.mark.parametrize("soon", [False, True])
def test_what_still_runs_is_cancelled_before_the_last_word_and_the_thread_ends(soon: bool) -> None:
    done: list[str] = []
    over = threading.Event()

    async def numbers() -> AsyncIterator[int]:
        try:
            for number in range(9):
                yield number
        finally:
            done.append("generator")
            over.set()

    left = numbers()

    async def begin() -> asyncio.Task[None]:
        async def work() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                done.append("cancelled")

        await anext(left)
        task = asyncio.ensure_future(work())
        await asyncio.sleep(0)
        return task

    async def last() -> None:
        await asyncio.sleep(0)
        done.append("last")

    thread = LoopThread("kept")
    task = thread.run(begin())
    (thread.stop_soon if soon else thread.stop)(last)
    assert over.wait(10)
    thread._thread.join(10)
    assert done == ["cancelled", "last", "generator"] and task.cancelled()
    assert not thread._thread.is_alive() and thread.loop.is_closed()


def test_what_runs_there_is_awaited_on_another_loop_and_cancelled_with_who_awaits_it() -> None:
    thread = LoopThread("kept")
    ended = threading.Event()

    async def there() -> str:
        return threading.current_thread().name

    async def never() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def ask() -> None:
        assert await thread.answer(there()) == "kept"
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(thread.answer(never()), 0.05)

    asyncio.run(ask())
    assert ended.wait(10)
    thread.stop()
