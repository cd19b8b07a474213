"""What every sandbox does before and around a run, whatever runs it."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from nemotron_steps.errors import SandboxError
from nemotron_steps.sandbox.base import (
    PAGE,
    Limits,
    Outcome,
    Sandbox,
    SandboxResult,
)


class Recorded(Sandbox):
    """Runs nothing: notes what it is given, and how many runs are under way at once."""

    def __init__(self, max_concurrency: int | None = None) -> None:
        super().__init__(max_concurrency)
        self.probes = self.running = self.most = 0
        self.given: list[tuple[list[str], bytes, Mapping[str, bytes], Limits]] = []

    async def probe(self) -> None:
        await asyncio.sleep(0)
        self.probes += 1

    async def execute(self, argv: list[str], stdin: bytes, files: Mapping[str, bytes], limits: Limits) -> SandboxResult:
        self.given.append((argv, stdin, files, limits))
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0.001)
        self.running -= 1
        return SandboxResult(Outcome.EXITED, 0, "", "", 0.0)


def run(sandbox: Sandbox, **given: Any) -> SandboxResult:
    return asyncio.run(sandbox.run(**given))


def test_a_sandbox_is_probed_once_and_runs_no_more_at_once_than_it_may() -> None:
    sandbox = Recorded(2)

    async def several() -> None:
        await asyncio.gather(*(sandbox.run(argv=["x"]) for _ in range(5)))

    asyncio.run(several())
    assert (sandbox.probes, sandbox.most, len(sandbox.given)) == (1, 2, 5)


def test_a_sandbox_that_its_probe_refused_is_probed_again_and_never_runs() -> None:
    class Refused(Recorded):
        async def probe(self) -> None:
            await super().probe()
            raise SandboxError("it lets programs out")

    sandbox = Refused()
    for tries in (1, 2):
        with pytest.raises(SandboxError):
            run(sandbox, argv=["x"])
        assert (sandbox.probes, sandbox.given) == (tries, [])


@pytest.mark.parametrize("path", ["/a", "../a", "a/../../b", "", "."])
def test_files_stay_in_the_working_folder(path: str) -> None:
    with pytest.raises(ValueError, match="relative paths"):
        run(Recorded(), argv=["x"], files={path: ""})


def test_files_take_whole_pages_of_the_scratch_space() -> None:
    limits = Limits(scratch_bytes=2 * PAGE, file_bytes=2 * PAGE)

    def outcome(files: dict[str, bytes], limits: Limits = limits) -> Outcome:
        sandbox = Recorded()
        result = run(sandbox, argv=["x"], files=files, limits=limits)
        assert bool(sandbox.given) is (result.outcome is Outcome.EXITED)
        return result.outcome

    assert outcome({"a": b"x" * PAGE, "b": b"x" * PAGE}) is Outcome.EXITED
    assert outcome({"a": b"x" * (PAGE + 1), "b": b"x"}) is Outcome.FILES_LIMIT
    assert outcome({"a": b"x", "b": b"x", "c": b""}) is Outcome.EXITED
    assert outcome({"a": b"x", "b": b"x", "c": b"x"}) is Outcome.FILES_LIMIT
    small = replace(limits, file_bytes=10)
    assert [outcome({"a": b"x" * size}, small) for size in (10, 11)] == [Outcome.EXITED, Outcome.FILES_LIMIT]
