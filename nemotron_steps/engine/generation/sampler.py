"""Lets many coroutines share one Generator: requests are queued, and one task steps it while anyone is waiting."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence

from nemotron_steps.engine.types import Completion, GenerationRequest, Generator, SamplingParams
from nemotron_steps.errors import RESUME, WorkerLostError

LOOK_SECONDS = 0.25
STALL_SECONDS = 60.0
"""With requests pending and not one token sampled for this long, a generator is dead."""


class AsyncSampler:
    """Async front of a Generator, which is stepped only from the event loop that runs `submit`. The work of `defer_to`,
    on the same device, goes first: a judge that waits until the policy has drained decodes full batches."""

    def __init__(self, generator: Generator, *, name: str = "sampler", defer_to: AsyncSampler | None = None) -> None:
        self.generator = generator
        self._name = name
        self._defer_to = defer_to
        self._ids = itertools.count()
        self._waiting: dict[str, list[asyncio.Future[Completion]]] = {}
        self._pump_task: asyncio.Task[None] | None = None
        self.generated_tokens = 0
        self.loop: asyncio.AbstractEventLoop | None = None
        """The loop that steps the generator; None before the first `bind` or `submit`. Other threads reach it so."""

    def bind(self) -> None:
        """Step from the running loop from now on."""
        self.loop = asyncio.get_running_loop()

    @property
    def busy(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._waiting)

    def is_sampling(self, request_id: str) -> bool:
        """Whether a request is unfinished."""
        return request_id in self._waiting

    def submit(
        self, prompt_ids: Sequence[int], params: SamplingParams, n: int = 1, request_id: str | None = None
    ) -> list[asyncio.Future[Completion]]:
        """Queue n samples of one prompt; one future a rollout, resolved as each finishes. A seeded request must pass
        its own request_id, since the random stream depends on it."""
        loop = self.loop = asyncio.get_running_loop()
        request_id = request_id if request_id is not None else f"{self._name}-{next(self._ids)}"
        if request_id in self._waiting:
            raise ValueError(f"request id {request_id!r} is already being sampled")
        self.generator.submit(GenerationRequest(request_id, prompt_ids, params, n))
        futures: list[asyncio.Future[Completion]] = [loop.create_future() for _ in range(n)]
        self._waiting[request_id] = futures
        if self._pump_task is None or self._pump_task.done():
            self._pump_task = loop.create_task(self._pump())
        return futures

    async def sample(
        self, prompt_ids: Sequence[int], params: SamplingParams, request_id: str | None = None
    ) -> Completion:
        """One sample of one prompt."""
        return await self.submit(prompt_ids, params, 1, request_id)[0]

    def cancel(self, prefix: str) -> None:
        """Drop every request whose id starts with `prefix`; whoever awaits one is cancelled."""
        for request_id in [r for r in self._waiting if r.startswith(prefix)]:
            self.cancel_request(request_id)

    def cancel_request(self, request_id: str) -> None:
        """Drop one request; unknown and finished ones are ignored."""
        futures = self._waiting.pop(request_id, None)
        if futures is None:
            return
        self.generator.cancel(request_id)
        for future in futures:
            future.cancel()

    async def _pump(self) -> None:
        # Only time between looks counts, a second a look at most: the loop may have been busy with a checkpoint.
        sampled, looked_at, silent_s = self.generator.sampled_tokens, time.monotonic(), 0.0
        try:
            while self._waiting:
                # Sleeping lets the coroutines whose futures just resolved run, and queue more, before the next step.
                await asyncio.sleep(0)
                while self._defer_to is not None and self._defer_to.busy:
                    await asyncio.sleep(0)
                for completion in self.generator.step():
                    self._resolve(completion)
                now = time.monotonic()
                if now - looked_at < LOOK_SECONDS:  # asking after every token costs as much as sampling it
                    continue
                silent_s = silent_s + min(now - looked_at, 1.0) if sampled == self.generator.sampled_tokens else 0.0
                sampled, looked_at = self.generator.sampled_tokens, now
                if silent_s > STALL_SECONDS:
                    raise WorkerLostError(
                        f"the generator `{self._name}` has sampled no token for {STALL_SECONDS:.0f} s",
                        found=f"{self.generator.pending()} samples pending",
                        hints=[RESUME],
                    )
        except Exception as error:
            for futures in self._waiting.values():
                for future in futures:
                    if not future.done():
                        future.set_exception(error)
            self._waiting.clear()
        except BaseException:  # the loop ends: nobody will step these requests any further
            for request_id in list(self._waiting):
                self.cancel_request(request_id)
            raise

    def _resolve(self, completion: Completion) -> None:
        self.generated_tokens += len(completion.token_ids)
        futures = self._waiting.get(completion.request_id)
        if futures is None:  # cancelled meanwhile
            return
        if not futures[completion.index].done():
            futures[completion.index].set_result(completion)
        if all(future.done() for future in futures):
            del self._waiting[completion.request_id]
