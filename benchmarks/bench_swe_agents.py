"""How many agents work at once on two cores, and how many turns they take a second, in bubblewrap.

    python -m benchmarks.bench_swe_agents [8 64 128] [--turns 10] [--commands 6]

Every agent has a working copy of its own; a turn is one `bash` command.
"""

import argparse
import asyncio
import time

from nemotron_steps.environments.base import Session
from nemotron_steps.environments.registry import create
from tests.environments.swe.tasks import task


async def measure(agents: int, turns: int, commands: int) -> tuple[float, float]:
    """(seconds until every working copy is open, turns a second from then on)."""
    environment = create("swe_agent", {"max_concurrency": commands})
    await environment.start()
    sessions = [await environment.seed(task()) for _ in range(agents)]

    async def take(session: Session, number: int) -> None:
        for _ in range(number):
            answer = await environment.call_tool(session, "bash", {"command": "echo here"})
            assert answer.strip() == "here", answer

    try:
        started = time.perf_counter()
        await asyncio.gather(*(take(session, 1) for session in sessions))
        opened = time.perf_counter()
        await asyncio.gather(*(take(session, turns) for session in sessions))
        return opened - started, agents * turns / (time.perf_counter() - opened)
    finally:
        await asyncio.gather(*map(environment.release, sessions))
        await environment.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("agents", type=int, nargs="*", default=[8, 64, 128])
    parser.add_argument("--turns", type=int, default=10, help="of each agent")
    parser.add_argument("--commands", type=int, default=6, help="commands at once")
    options = parser.parse_args()
    print("| agents | working copies open | turns a second |\n|---|---|---|")
    for agents in options.agents:
        opened, rate = asyncio.run(measure(agents, options.turns, options.commands))
        print(f"| {agents} | {opened:.1f} s | {rate:.0f} |", flush=True)


if __name__ == "__main__":
    main()
