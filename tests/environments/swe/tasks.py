"""A small repository with a fault, as a row."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from nemotron_steps.environments.base import GradeResult, Response
from nemotron_steps.environments.registry import create

CALC = "def add(a, b):\n    return a - b\n\n\ndef sub(a, b):\n    return a - b\n"
TESTS = """\
import unittest

from pkg.calc import add, sub


class TestCalc(unittest.TestCase):
    def test_add(self):
        self.assertEqual(add(2, 3), 5)

    def test_sub(self):
        self.assertEqual(sub(2, 3), -1)
"""
FIX = {"path": "pkg/calc.py", "old_str": "def add(a, b):\n    return a -", "new_str": "def add(a, b):\n    return a +"}
LIBRARIES = [str(Path(pytest.__file__).parents[1])]
"""Where pytest is: not always in the environment that runs the tests itself."""
Call = tuple[str, dict[str, Any]]
FIXED: list[Call] = [("edit", FIX)]


def task(runner: str = "unittest", **changed: Any) -> dict[str, Any]:
    by_unittest = runner == "unittest"
    names = "tests.test_calc.TestCalc.{}" if by_unittest else "tests/test_calc.py::TestCalc::{}"
    command = "python -m unittest -v {tests}" if by_unittest else "python -m pytest -rA -p no:cacheprovider {tests}"
    return {
        "responses_create_params": {"input": [{"role": "user", "content": "add is wrong"}]},
        "agent_ref": {"type": "responses_api_agents", "name": "swe_agent"},
        "instance_id": "calc-1",
        "repo": "calc",
        "base_commit": "0",
        "FAIL_TO_PASS": [names.format("test_add")],
        "PASS_TO_PASS": [names.format("test_sub")],
        "files": {"pkg/__init__.py": "", "pkg/calc.py": CALC, "pyproject.toml": "[tool.x]\n"},
        "test_files": {"tests/test_calc.py": TESTS, "tests/__init__.py": ""},
        "test_command": command,
        **changed,
    }


def rollout(calls: Sequence[Call], row: dict[str, Any] | None = None, **settings: Any) -> tuple[list[str], GradeResult]:
    """What the tools answered, and the verdict."""
    row = row or task()

    async def body() -> tuple[list[str], GradeResult]:
        environment = create("swe_agent", settings)
        environment.check_row(row, "rows.jsonl:1")
        await environment.start()
        session = await environment.seed(row)
        try:
            answers = [await environment.call_tool(session, name, arguments) for name, arguments in calls]
            (verdict,) = await environment.judge_group(row, [Response.from_output([])], [session])
        finally:
            await environment.release(session)
            await environment.close()
        return answers, verdict

    return asyncio.run(body())


def bash(command: str) -> Call:
    return "bash", {"command": command}
