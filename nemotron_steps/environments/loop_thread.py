"""An event loop in a thread of its own, for servers and clients that must run while the caller's own loop is away."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

Value = TypeVar("Value")


class LoopThread:
    """See the module docstring. It does not keep the process from ending."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Value]) -> Value:
        """Run a coroutine there and wait for it, from any other thread."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    def stop(self, last: Callable[[], Awaitable[None]] | None = None) -> None:
        """Cancel what still runs there, await `last` there, and end the thread."""
        self.run(self._end(last))
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    async def _end(self, last: Callable[[], Awaitable[None]] | None) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        if last is not None:
            await last()
        await self.loop.shutdown_asyncgens()
