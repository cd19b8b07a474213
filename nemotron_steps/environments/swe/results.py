"""What a test run says: which tests passed, in the words of `pytest -rA` and of `unittest -v`.

The code under test runs in the test process and may print what it likes: this is only what is claimed (blinding.py has
the proof). A test counts as passed only if it is never reported otherwise.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

_PYTEST = re.compile(r"^(PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\s+(\S.*?)(?: - .*)?$", re.MULTILINE)
# A test with a docstring has its first line before the dots.
_UNITTEST = re.compile(
    r"^(\w+ \([\w.]+\))(?:\n[^\n]*?)? \.\.\. (ok|FAIL|ERROR|skipped|expected failure|unexpected success)", re.MULTILINE
)
_GOOD = frozenset({"PASSED", "XFAIL", "ok", "expected failure"})
_NEUTRAL = frozenset({"SKIPPED", "skipped"})


@dataclass(frozen=True)
class TestRun:
    """Tests by what was said of them: passed and nothing else, or (also) something else."""

    passed: frozenset[str]
    others: frozenset[str]


def test_run(output: str) -> TestRun:
    """Read the output of a test command."""
    found = [(name, status) for status, name in _PYTEST.findall(output)]
    found += [(dotted(name), status) for name, status in _UNITTEST.findall(output)]
    good = {name for name, status in found if status in _GOOD}
    bad = {name for name, status in found if status not in _GOOD | _NEUTRAL}
    return TestRun(frozenset(good - bad), frozenset({name for name, status in found if status not in _GOOD}))


def dotted(name: str) -> str:
    """`test_a (m.C)`, as unittest before Python 3.11 and SWE-bench write it, or `test_a (m.C.test_a)`: `m.C.test_a`."""
    found = re.fullmatch(r"(\w+) \(([\w.]+)\)", name)
    return f"{found[2].removesuffix(f'.{found[1]}')}.{found[1]}" if found else name


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
    return frozenset(map(dotted, value))
