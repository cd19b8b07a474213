"""Samples for HTTP requests, out of a generator that another thread's event loop may be stepping.

The sampler belongs to one loop (the training run's); the HTTP server runs on its own, so that it answers health checks
while the policy trains. Requests made meanwhile wait, and are sampled when the run samples again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from nemotron_steps.engine.generation.sampler import AsyncSampler
from nemotron_steps.engine.serving.api_errors import ApiError
from nemotron_steps.engine.types import Completion, SamplingParams
from nemotron_steps.errors import EngineError

_POLL_SECONDS = 0.5


class SamplerBridge:
    """Asks a sampler from any event loop."""

    def __init__(self, sampler: AsyncSampler) -> None:
        self._sampler = sampler
        self._running: dict[str, asyncio.Event] = {}

    @property
    def ready(self) -> bool:
        """Whether there is a loop that steps the generator."""
        return self._sampler.loop is not None and not self._sampler.loop.is_closed()

    @property
    def weight_version(self) -> int:
        """Version of the weights that the next token is sampled with."""
        return self._sampler.generator.weight_version

    async def samples(
        self, prompt_ids: Sequence[int], params: SamplingParams, n: int, request_id: str
    ) -> AsyncGenerator[Completion, None]:
        """n samples as they finish. Leaving the generator early drops what is unfinished.

        Raises:
            ApiError: 503 when nothing steps the generator, 400 when it refuses the request, 500 when it broke.
        """
        # The same seeded request twice at a time: the second waits, since the generator tells requests apart by id.
        while request_id in self._running:
            await self._running[request_id].wait()
        self._running[request_id] = asyncio.Event()
        try:
            async with aclosing(self._sample(prompt_ids, params, n, request_id)) as completions:
                async for completion in completions:
                    yield completion
        finally:
            self._running.pop(request_id).set()

    async def _sample(
        self, prompt_ids: Sequence[int], params: SamplingParams, n: int, request_id: str
    ) -> AsyncGenerator[Completion, None]:
        here, there = asyncio.get_running_loop(), self._sampler.loop
        if there is None or there.is_closed():
            raise ApiError(503, "the generator is not ready", code="not_ready")
        results: asyncio.Queue[Completion | BaseException] = asyncio.Queue()

        def tell(result: Completion | BaseException) -> None:
            if not here.is_closed():
                here.call_soon_threadsafe(results.put_nowait, result)

        def finished(future: asyncio.Future[Completion]) -> None:
            if future.cancelled():
                tell(ApiError(503, "the request was dropped by the run", code="dropped"))
            else:
                tell(future.exception() or future.result())

        def submit() -> None:  # on the sampler's loop
            try:
                futures = self._sampler.submit(prompt_ids, params, n, request_id)
            except (EngineError, ValueError) as error:
                message = error.what if isinstance(error, EngineError) else str(error)
                tell(ApiError(400, message, code="refused_by_generator"))
                return
            except Exception as error:  # nobody awaits this callback: whoever asked learns of it
                tell(error)
                return
            for future in futures:
                future.add_done_callback(finished)

        there.call_soon_threadsafe(submit)
        done = 0
        try:
            while done < n:
                try:
                    async with asyncio.timeout(_POLL_SECONDS):  # wait_for may swallow a cancellation (Python 3.11)
                        result = await results.get()
                except TimeoutError:
                    if there.is_closed():
                        raise ApiError(503, "the run ended", code="not_ready") from None
                    continue
                if isinstance(result, ApiError):
                    raise result
                if isinstance(result, BaseException):
                    raise ApiError(500, f"generation broke: {result}") from result
                done += 1
                yield result
        finally:
            if done < n and not there.is_closed():
                there.call_soon_threadsafe(self._sampler.cancel_request, request_id)
