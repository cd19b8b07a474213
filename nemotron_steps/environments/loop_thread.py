"""An event loop in a thread of its own, for servers and clients that must run while the caller's own loop is away."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

Value = TypeVar("Value")
Last = Callable[[], Awaitable[None]]


class LoopThread:
    """See the module docstring. It does not keep the process from ending."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Value]) -> Value:
        """Run a coroutine there and wait for it, from any other thread."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    async def answer(self, work: Coroutine[Any, Any, Value]) -> Value:
        """As run, awaited on another loop; cancelled with whoever awaits."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self.loop))

    def stop(self, last: Last | None = None) -> None:
        """Cancel what still runs there, await `last` there, and end the thread."""
        self.stop_soon(last)
        self._thread.join()

    def stop_soon(self, last: Last | None = None) -> None:
        """As stop, without waiting: a finalizer may be called in any thread, this one too."""

        def begin() -> None:
            self._ending = self.loop.create_task(self._end(last))  # the loop itself holds no task

        self.loop.call_soon_threadsafe(begin)

    def _run(self) -> None:
        self.loop.run_forever()
        self.loop.close()

    async def _end(self, last: Last | None) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        if last is not None:
            await last()
        await self.loop.shutdown_asyncgens()
        self.loop.stop()
