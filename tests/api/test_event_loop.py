"""Loops of one's own below a loop that is running, and that one as it was afterwards."""

import asyncio

from nemotron_steps.api.planned import outside_event_loop


def test_loops_nest_and_the_outer_one_goes_on() -> None:
    async def inner() -> str:
        await asyncio.sleep(0)
        return "done"

    async def cell() -> list[str]:
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        beside = asyncio.create_task(inner())
        with outside_event_loop():
            found = [asyncio.run(inner()), asyncio.run(inner())]
            assert not beside.done()
        assert asyncio.current_task() is task and asyncio.get_running_loop() is loop
        assert asyncio.get_event_loop() is loop
        async with asyncio.timeout(5):  # needs the current task
            return [*found, await beside]

    assert asyncio.run(cell()) == ["done", "done", "done"]
