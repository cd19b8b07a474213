"""Plain calls where an event loop is running already: a notebook's cell is a task of one.

Steps run event loops of their own, and asyncio allows one a thread. The caller's task does nothing while a call that
is not asynchronous works, so its loop is taken off the thread for that long and put back afterwards. In a thread of its
own the run could not be interrupted (docs/decisions/runs-in-notebooks.md).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def outside_event_loop() -> Iterator[None]:
    """No event loop is running within, and the one before is again afterwards. Nothing of it runs meanwhile."""
    loop = asyncio._get_running_loop()
    if loop is None:
        yield
        return
    task = asyncio.current_task()
    # asyncio documents these for schedulers and tasks of one's own (Extending).
    if task is not None:
        asyncio.tasks._leave_task(loop, task)
    asyncio._set_running_loop(None)
    try:
        yield
    finally:
        # A runner that ends leaves the thread without one.
        asyncio.set_event_loop(loop)
        asyncio._set_running_loop(loop)
        if task is not None:
            asyncio.tasks._enter_task(loop, task)
