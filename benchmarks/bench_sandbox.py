"""What the sandbox costs: its start-up probe, one execution, executions a second with two workers, with and without the
system call filter. `python -m benchmarks.bench_sandbox [EXECUTIONS]`
"""

import asyncio
import sys
import time
from statistics import median

from nemotron_steps.sandbox import SandboxResult
from nemotron_steps.sandbox.bubblewrap import BubblewrapSandbox
from nemotron_steps.sandbox.seccomp import architecture, filter_program

WORKERS = 2
PROBES = 7
PROGRAMS = {
    "/bin/true": {"argv": ["/bin/true"]},
    "Python, `pass`": {"code": "pass"},
    "Python, 200,000 system calls": {"code": "import os\nfor _ in range(200_000): os.getppid()"},
}


class Unfiltered(BubblewrapSandbox):
    """With a filter that allows every call; it passes no probe."""

    def filter_program(self) -> bytes:
        return filter_program(architecture(), also=("*",))

    async def probe(self) -> None:
        pass


async def seconds_of(sandbox: BubblewrapSandbox, program: dict[str, object]) -> float:
    began = time.perf_counter()
    result: SandboxResult = await sandbox.run(**program)  # type: ignore[arg-type]
    assert result.ok, result
    return time.perf_counter() - began


async def measure(
    sandbox: BubblewrapSandbox, program: dict[str, object], executions: int
) -> tuple[float, float, float]:
    """Median and worst time of one execution, executions a second side by side."""
    alone = [await seconds_of(sandbox, program) for _ in range(executions)]
    began = time.perf_counter()
    await asyncio.gather(*(seconds_of(sandbox, program) for _ in range(WORKERS * executions)))
    return median(alone), max(alone), WORKERS * executions / (time.perf_counter() - began)


async def main(executions: int) -> None:
    probes = []
    for _ in range(PROBES):
        began = time.perf_counter()
        await BubblewrapSandbox().start()
        probes.append(time.perf_counter() - began)
    print(f"probe: median {median(probes) * 1e3:.0f} ms, worst {max(probes) * 1e3:.0f} ms")
    for kind in (BubblewrapSandbox, Unfiltered):
        sandbox = kind(max_concurrency=WORKERS)
        await sandbox.start()
        for name, program in PROGRAMS.items():
            middle, worst, rate = await measure(sandbox, program, executions)
            print(
                f"{kind.__name__:18} {name:30} median {middle * 1e3:6.1f} ms, worst {worst * 1e3:6.1f} ms, "
                f"{rate:6.1f} a second with {WORKERS} workers"
            )


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 50))
