"""Graders that an answer could make slow, in helper processes that are cut off.

A grader is a top-level function of JSON values that returns a JSON value. A thread would not do: Python code that
computes keeps the event loop waiting, and nothing can stop it.
"""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Callable
from typing import Any

from nemotron_steps.environments.base import VERIFIER_CRASHED, VERIFIER_TIMEOUT, GraderFailedError
from nemotron_steps.environments.line_worker import WorkerCrashedError, WorkerPool, WorkerTimeoutError, serve


class GradingPool:
    """Calls of one grader.

    Args:
        grade: a function that can be imported by its name.
        size: helper processes; each is started when first needed.
        cpu_s: seconds of processor time of one call.
    """

    def __init__(self, grade: Callable[..., Any], *, size: int = 2, cpu_s: float = 10.0) -> None:
        self._name = f"{grade.__module__}:{grade.__qualname__}"
        module = "nemotron_steps.environments.grading_pool"
        self._workers = WorkerPool(module, size=size, cpu_s=cpu_s, imports=(grade.__module__,))

    async def call(self, *arguments: Any) -> Any:
        """What the grader returns."""
        try:
            reply = await self._workers.call({"grader": self._name, "arguments": arguments})
        except WorkerTimeoutError as error:
            raise GraderFailedError(VERIFIER_TIMEOUT, f"{self._name}: {error}") from error
        except WorkerCrashedError as error:
            raise GraderFailedError(VERIFIER_CRASHED, f"{self._name}: {error}") from error
        if "error" in reply:
            raise GraderFailedError(VERIFIER_CRASHED, f"{self._name}: {reply['error']}")
        return reply["value"]

    async def close(self) -> None:
        """End the helper processes."""
        await self._workers.close()


def answer_request(request: dict[str, Any]) -> dict[str, Any]:
    """The helper's side of a call."""
    module, _, name = request["grader"].partition(":")
    grade = getattr(importlib.import_module(module), name)
    try:
        return {"value": grade(*request["arguments"])}
    except Exception:
        return {"error": traceback.format_exc(limit=-2)[-1000:]}


if __name__ == "__main__":
    serve(answer_request)
