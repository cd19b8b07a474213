"""Equal servers behind one client: which one is asked next, and which ones are lost for now.

The least loaded is asked first, equal ones in turn. One that gives no answer is left alone, reported once, and comes
back when it is ready again; where all are lost, all are asked, so that the last word is a server's and never a guess.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

_LOG = logging.getLogger(__name__)

LOST_FOR_S = 10.0
"""A lost server is left alone at least so long: one that is ready and still fails must not be reported every second."""


@dataclass(eq=False)
class Replica:
    """One of the servers. `in_flight` counts requests that wait for `free`, too."""

    url: str
    free: asyncio.Semaphore
    in_flight: int = 0
    lost: bool = False


class Replicas:
    """See the module docstring. Used on one event loop.

    Args:
        urls: of the servers, at least one.
        max_concurrency: requests in flight at once at each of them.
        ready: returns once a server is ready, however long that takes.
    """

    def __init__(self, urls: Sequence[str], max_concurrency: int, ready: Callable[[Replica], Awaitable[None]]) -> None:
        self.all = tuple(Replica(url, asyncio.Semaphore(max_concurrency)) for url in urls)
        self._ready = ready
        self._turn = 0
        self._recovering: dict[Replica, asyncio.Task[None]] = {}

    def in_order(self) -> list[Replica]:
        """Whom to ask, best first; lost ones last."""
        self._turn = (self._turn + 1) % len(self.all)
        turned = self.all[self._turn :] + self.all[: self._turn]
        return sorted(turned, key=lambda replica: (replica.lost, replica.in_flight))

    def lose(self, replica: Replica, cause: str) -> None:
        """It gave no answer. The only server there is cannot be lost: there is nobody else to ask."""
        if replica.lost or len(self.all) == 1:
            return
        replica.lost = True
        others = [each.url for each in self.all if not each.lost]
        _LOG.warning("%s gives no answer (%s); asked instead: %s", replica.url, cause, ", ".join(others) or "none left")
        self._recovering[replica] = asyncio.ensure_future(self._recover(replica))

    def find(self, replica: Replica) -> None:
        """It answers."""
        if replica.lost:
            replica.lost = False
            _LOG.warning("%s answers again", replica.url)
            # Lost once more, it is left alone for as long as the first time.
            recovering = self._recovering.pop(replica, None)
            if recovering is not None:
                recovering.cancel()

    async def _recover(self, replica: Replica) -> None:
        await asyncio.sleep(LOST_FOR_S)
        await self._ready(replica)
        del self._recovering[replica]
        self.find(replica)
