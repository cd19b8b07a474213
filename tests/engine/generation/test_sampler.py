"""Many coroutines on one generator: who gets which sample, and what cancelling leaves."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from nemotron_steps.engine.generation import sampler as module
from nemotron_steps.engine.generation.sampler import AsyncSampler
from nemotron_steps.engine.types import Completion, FinishReason, GenerationRequest, SamplingParams
from nemotron_steps.errors import WorkerLostError

PARAMS = SamplingParams(4)


class Generator:
    """Finishes the newest sample first, one a step."""

    def __init__(self) -> None:
        self.left: list[tuple[GenerationRequest, int]] = []
        self.log: list[str] = []
        self.sampled_tokens = 0
        self.broken: Exception | None = None

    def submit(self, request: GenerationRequest) -> None:
        self.left += [(request, index) for index in range(request.n)]

    def step(self) -> list[Completion]:
        if self.broken is not None:
            raise self.broken
        if not self.left:
            return []
        self.sampled_tokens += 1
        request, index = self.left.pop()
        self.log.append(f"{request.request_id}[{index}]")
        tokens = [*request.prompt_ids, index]
        return [Completion(request.request_id, index, tokens, [0.0] * len(tokens), FinishReason.STOP, [], None)]

    def cancel(self, request_id: str) -> None:
        self.log.append(f"cancelled {request_id}")
        self.left = [(request, index) for request, index in self.left if request.request_id != request_id]

    def pending(self) -> int:
        return len(self.left)


def sampler(generator: Generator, **options: Any) -> AsyncSampler:
    return AsyncSampler(generator, **options)  # type: ignore[arg-type]


def test_every_sample_reaches_who_asked_for_it() -> None:
    generator = Generator()
    asked = sampler(generator, name="policy")

    async def run() -> list[Any]:
        assert not asked.busy and asked.loop is None
        group = asked.submit([7], PARAMS, 2, "g")
        with pytest.raises(ValueError, match="'g' is already"):
            asked.submit([7], PARAMS, 1, "g")
        assert asked.busy and asked.loop is asyncio.get_running_loop()
        single = asyncio.ensure_future(asked.sample([8], PARAMS))
        return await asyncio.gather(*group, single)

    found = asyncio.run(run())
    assert [completion.token_ids for completion in found] == [[7, 0], [7, 1], [8, 0]]
    assert found[2].request_id == "policy-0" and not asked.busy and asked.generated_tokens == 6


def test_cancelled_requests_are_dropped_and_others_go_on() -> None:
    generator = Generator()
    asked = sampler(generator)

    async def run() -> None:
        gone = [*asked.submit([1], PARAMS, 2, "a/1"), *asked.submit([1], PARAMS, 1, "a/2")]
        kept = asked.submit([2], PARAMS, 1, "b")
        asked.cancel("a/")
        asked.cancel_request("unknown")
        assert (await kept[0]).token_ids == [2, 0]
        assert all(future.cancelled() for future in gone)

    asyncio.run(run())
    assert generator.log == ["cancelled a/1", "cancelled a/2", "b[0]"]


def test_a_judge_waits_until_the_policy_has_nothing_to_do() -> None:
    first, second = Generator(), Generator()
    second.log = first.log
    policy = sampler(first, name="policy")
    judge = sampler(second, name="judge", defer_to=policy)

    async def run() -> None:
        verdict = asyncio.ensure_future(judge.sample([1], PARAMS, "j"))
        await asyncio.gather(*policy.submit([2], PARAMS, 3, "p"))
        await verdict

    asyncio.run(run())
    assert first.log == ["p[2]", "p[1]", "p[0]", "j[0]"]


def test_a_generator_that_breaks_is_an_error_of_everyone_who_waits_and_may_be_asked_again() -> None:
    generator = Generator()
    asked = sampler(generator)

    async def run() -> None:
        generator.broken = LookupError("gone")
        futures = asked.submit([1], PARAMS, 2, "a")
        for future in futures:
            with pytest.raises(LookupError, match="gone"):
                await future
        assert not asked.busy
        generator.broken, generator.left = None, []
        assert (await asked.sample([3], PARAMS, "a")).token_ids == [3, 0]

    asyncio.run(run())


def test_a_generator_is_dead_after_a_minute_of_silence_and_a_look_counts_a_second_at_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = iter(range(0, 3000, 30))
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(now)))
    generator = Generator()
    steps: list[int] = []
    generator.step = lambda: steps.append(1) or []  # type: ignore[method-assign,func-returns-value]

    async def run() -> None:
        with pytest.raises(WorkerLostError, match="`policy` has sampled no token for 60 s"):
            await sampler(generator, name="policy").sample([7], PARAMS)

    asyncio.run(run())
    assert len(steps) == 61
