"""What a test run says: which tests passed, in the words of `pytest -rA` and of `unittest -v`.

The code under test runs in the test process and may print what it likes. A test counts as passed only if it is never
reported otherwise, and the run as a whole only if a test that must fail, of a name that nobody knew, is reported as
failed: a run that was ended early, or in which everything was made to pass, does not show that.
"""

from __future__ import annotations

import json
import random
import re
import secrets
from dataclasses import dataclass
from typing import Any

_PYTEST = re.compile(r"^(PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\s+(\S.*?)(?: - .*)?$", re.MULTILINE)
# A test with a docstring has its first line before the dots.
_UNITTEST = re.compile(
    r"^\w+ \(([\w.]+)\)(?:\n[^\n]*?)? \.\.\. (ok|FAIL|ERROR|skipped|expected failure|unexpected success)", re.MULTILINE
)
_GOOD = frozenset({"PASSED", "XFAIL", "ok", "expected failure"})
_NEUTRAL = frozenset({"SKIPPED", "skipped"})


@dataclass(frozen=True)
class TestRun:
    """Tests by what was said of them. One of which both was said is failed."""

    passed: frozenset[str]
    failed: frozenset[str]


@dataclass(frozen=True)
class Canary:
    """A test that must fail, in a file of its own."""

    name: str

    @classmethod
    def new(cls) -> Canary:
        """One that no one has seen."""
        return cls(secrets.token_hex(6))

    @property
    def path(self) -> str:
        """Its file."""
        return f"test_{self.name}.py"

    @property
    def text(self) -> str:
        """Its source: a TestCase, which both runners take."""
        left = random.SystemRandom().randrange(10**6)
        lines = ["import unittest", "", "", f"class T{self.name}(unittest.TestCase):"]
        lines += [f"    def test_{self.name}(self):", f"        self.assertEqual({left}, {left + 1})", ""]
        return "\n".join(lines)

    def failed_in(self, run: TestRun) -> bool:
        """Whether it was seen to fail."""
        return any(f"test_{self.name}" in test for test in run.failed)


def test_run(output: str) -> TestRun:
    """Read the output of a test command."""
    found = [(name, status) for status, name in _PYTEST.findall(output)] + _UNITTEST.findall(output)
    good = {name for name, status in found if status in _GOOD}
    bad = {name for name, status in found if status not in _GOOD and status not in _NEUTRAL}
    return TestRun(frozenset(good - bad), frozenset(bad))


def tests_of(row: Any, key: str) -> frozenset[str]:
    """FAIL_TO_PASS or PASS_TO_PASS of a row: a list, or one as JSON text.

    Raises:
        ValueError: it is neither.
    """
    value = row.get(key) or []
    if isinstance(value, str):
        value = json.loads(value)
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise ValueError(f"{key} is no list of names")
    return frozenset(value)
