import asyncio
import os
from collections.abc import Awaitable, Callable

import pytest

from nemotron_steps.sandbox.base import MIB, Limits, Outcome
from nemotron_steps.sandbox.bubblewrap import BubblewrapSandbox
from nemotron_steps.sandbox.session import BubblewrapSession, SessionOverError

pytestmark = pytest.mark.sandbox
SMALL = Limits(wall_s=60.0, memory_bytes=256 * MIB, scratch_bytes=8 * MIB, output_bytes=4096, processes=32)

HOG = """
import os, time
for _ in range(5):
  os.fork() or exec("x = bytearray(100 << 20); time.sleep(60)")
x = bytearray(100 << 20)
time.sleep(60)
"""
"""Six processes, each within the bound of one, that are together above that of the session."""


@pytest.fixture(scope="module")
def sandbox() -> BubblewrapSandbox:
    return BubblewrapSandbox(max_concurrency=8)


def inside(
    sandbox: BubblewrapSandbox, work: Callable[[BubblewrapSession], Awaitable[None]], limits: Limits = SMALL
) -> None:
    async def body() -> None:
        async with BubblewrapSession(sandbox, limits=limits) as session:
            await work(session)

    asyncio.run(body())


def test_commands_see_each_others_files_and_nothing_outlives_the_session(sandbox) -> None:
    async def work(session: BubblewrapSession) -> None:
        await session.write({"/scratch/repo/pkg/a.txt": "één\n", "/scratch/repo/b.txt": "b"})
        await session.run(["sh", "-c", "cat >> pkg/a.txt"], cwd="/scratch/repo", stdin="zwei\n")
        assert (await session.run(["cat", "pkg/a.txt"], cwd="/scratch/repo")).stdout == "één\nzwei\n"

    async def later(session: BubblewrapSession) -> None:
        assert (await session.run(["ls", "-A", "/scratch"])).stdout == ""

    inside(sandbox, work)
    inside(sandbox, later)


@pytest.mark.parametrize(
    ("command", "outcome"),
    [("sleep 60", Outcome.TIMEOUT), ("exec >&- 2>&-; sleep 60", Outcome.TIMEOUT), ("yes", Outcome.OUTPUT_LIMIT)],
)
def test_a_command_that_does_not_end_is_stopped_and_the_session_goes_on(sandbox, command: str, outcome) -> None:
    async def work(session: BubblewrapSession) -> None:
        stopped = await session.run(["sh", "-c", command], wall_s=1.0)
        assert stopped.outcome is outcome and stopped.exit_code is None and len(stopped.stdout) <= SMALL.output_bytes
        assert (await session.run(["echo", "still here"])).stdout == "still here\n"

    inside(sandbox, work)


def test_a_command_that_kills_its_session_loses_it_and_no_other(sandbox) -> None:
    async def body() -> None:
        async with BubblewrapSession(sandbox, limits=SMALL) as lost, BubblewrapSession(sandbox, limits=SMALL) as other:
            for _ in range(2):
                with pytest.raises(SessionOverError) as over:
                    await lost.run(["sh", "-c", "kill -9 -1"])
                assert over.value.outcome is Outcome.EXITED
            assert (await other.run(["echo", "on"])).stdout == "on\n"

    asyncio.run(body())


def test_total_time_and_memory_end_a_session_by_name(sandbox) -> None:
    async def work_on(limits: Limits, command: list[str]) -> Outcome:
        async with BubblewrapSession(sandbox, limits=limits) as session:
            with pytest.raises(SessionOverError) as over:
                await session.run(command)
            return over.value.outcome

    quick = Limits(wall_s=1.0, memory_bytes=256 * MIB, scratch_bytes=8 * MIB)
    assert asyncio.run(work_on(quick, ["sleep", "60"])) is Outcome.TIMEOUT
    assert asyncio.run(work_on(SMALL, ["python3", "-c", HOG])) is Outcome.MEMORY_LIMIT


def test_the_channel_and_the_host_are_out_of_reach(sandbox) -> None:
    async def work(session: BubblewrapSession) -> None:
        listing = await session.run(["sh", "-c", "ls /proc/2/fd; ls -l /proc/self/fd"])
        assert "Permission denied" in listing.stderr and "socket" not in listing.stdout
        reach = await session.run(["sh", "-c", "ls /etc/passwd /root/.ssh; cat < /dev/tcp/127.0.0.1/22"])
        assert not reach.ok and not reach.stdout

    inside(sandbox, work)


def test_a_session_that_is_cancelled_leaves_no_process(sandbox, tmp_path) -> None:
    async def body() -> int:
        session = BubblewrapSession(sandbox, limits=SMALL)
        await session.__aenter__()
        running = asyncio.ensure_future(session.run(["sleep", "300"]))
        await asyncio.sleep(0.2)
        running.cancel()
        await session.__aexit__(None, None, None)
        assert session._whole is not None
        return session._whole.done()

    assert asyncio.run(body())


def test_a_session_that_is_over_keeps_no_descriptor(sandbox) -> None:
    async def body() -> list[int]:
        counts, sessions = [], []  # kept: no descriptor is closed only because its session was collected
        for _ in range(3):
            sessions.append(BubblewrapSession(sandbox, limits=SMALL))
            async with sessions[-1] as session:
                await session.run(["true"])
            await asyncio.sleep(0.05)
            counts.append(len(os.listdir("/proc/self/fd")))
        return counts

    first, *later = asyncio.run(body())
    assert later == [first, first]
