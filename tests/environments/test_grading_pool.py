"""What becomes of a grader that does not give an answer."""

from __future__ import annotations

import asyncio
import importlib
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from nemotron_steps.environments.base import GraderFailedError
from nemotron_steps.environments.grading_pool import GradingPool, answer_request
from nemotron_steps.environments.line_worker import WorkerCrashedError, WorkerTimeoutError
from nemotron_steps.environments.text.math_with_judge import compare


@pytest.mark.parametrize(
    ("ends", "failure", "told"),
    [
        (WorkerTimeoutError("it took longer than 3 s"), "verifier_timeout", "longer than 3 s"),
        (WorkerCrashedError("exit code 7"), "verifier_crashed", "math_with_judge:compare: exit code 7"),
        ({"error": "KeyError"}, "verifier_crashed", "math_with_judge:compare: KeyError"),
    ],
)
def test_a_grader_that_does_not_end_or_dies_or_raises_is_a_failure_of_its_own(
    ends: Any, failure: str, told: str
) -> None:
    class Worker:
        async def call(self, request: Any) -> Any:
            if isinstance(ends, Exception):
                raise ends
            return ends

    pool: Any = GradingPool(compare)
    pool._workers = Worker()
    with pytest.raises(GraderFailedError, match=told) as caught:
        asyncio.run(pool.call("1", "2"))
    assert caught.value.failure == failure


def test_a_grader_is_called_by_its_name_and_what_it_raises_is_told() -> None:
    called = {"grader": "builtins:divmod", "arguments": [7, 2]}
    assert answer_request(called) == {"value": (3, 1)}
    assert "ZeroDivisionError" in answer_request({**called, "arguments": [7, 0]})["error"]


def test_a_grader_is_imported_before_its_time_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = "import traceback\nBY = [frame.name for frame in traceback.extract_stack()]\ndef imported_by(): return BY\n"
    (tmp_path / "tells_its_import.py").write_text(told)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))

    async def ask() -> Any:
        pool = GradingPool(importlib.import_module("tells_its_import").imported_by, size=1, cpu_s=60.0)
        try:
            return await pool.call()
        finally:
            await pool.close()

    by = asyncio.run(ask())
    del sys.modules["tells_its_import"]
    assert "serve" in by and "answer_request" not in by
