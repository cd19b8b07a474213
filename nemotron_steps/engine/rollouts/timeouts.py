"""How long the engine waits for an environment before it calls it dead.

Environments and judges bound their own waits by timeouts and retries, and report a judge that is down themselves. This
catches what does neither, so that no loop waits for ever. A generator's own bound is in generation/sampler.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from nemotron_steps.errors import RESUME, WorkerLostError
from nemotron_steps.waiting import waiting

ENVIRONMENT_SECONDS = 3600.0
"""For one call: seeding, a tool, a follow-up question, the verdict of a group."""
AGENT_SECONDS = 6 * 3600.0
"""For a whole rollout that an environment's own agent runs."""

Answer = TypeVar("Answer")


async def call_with_timeout(name: str, call: str, answer: Awaitable[Answer]) -> Answer:
    """What an environment answers.

    Args:
        name: of the environment. call: of its method. Both for the message.

    Raises:
        WorkerLostError: it did not answer in time.
    """
    limit = AGENT_SECONDS if call == "run_agent" else ENVIRONMENT_SECONDS
    try:
        async with asyncio.timeout(limit) as clock:
            with waiting(f"the environment `{name}` ({call})", limit):
                return await answer
    except TimeoutError as error:
        if not clock.expired():  # the environment's own
            raise
        raise WorkerLostError(
            f"the environment `{name}` has not answered for {limit:.0f} s: it, or a judge it asks, is dead",
            where=f"{name}.{call}",
            hints=[RESUME],
        ) from error
