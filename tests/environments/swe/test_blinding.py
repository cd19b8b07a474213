"""Assertions without what they expect: what right and wrong code records, and what that proves. Run in this process."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nemotron_steps.environments.swe.blinding import Blinded
from nemotron_steps.environments.swe.expectations import Findings

NAME = "tests/test_m.py::T::test_it"


def run(source: str, value: Any) -> Findings:
    """Run `test_it` of a TestCase on `f()`, as a Grader does."""
    body = "".join(f"        {line}\n" for line in source.splitlines())
    text = f"import unittest\nimport pytest\n\nclass T(unittest.TestCase):\n    def test_it(self):\n{body}"
    tests = Blinded({"tests/test_m.py": text})

    def once(orders: Any) -> Findings:
        Path(tests.record_path).unlink(missing_ok=True)
        space: dict[str, Any] = {"__name__": "m", "f": value}
        exec(tests.texts(orders).get("tests/test_m.py", text), space)
        result = space["T"]("test_it").run()
        passed = [NAME] if result is not None and result.wasSuccessful() else []
        records = Path(tests.record_path)
        found = tests.expected.findings(passed, [], records.read_text() if records.exists() else "", orders)
        records.unlink(missing_ok=True)
        return found

    findings = once(None)
    return once(tests.expected.orders(findings.opaque)) if findings.opaque else findings


class Money:
    """Compares with numbers."""

    def __init__(self, cents: int) -> None:
        self.cents = cents

    def __eq__(self, other: object) -> bool:
        return self.cents == (other.cents if isinstance(other, Money) else other)

    def __lt__(self, other: int) -> bool:
        return self.cents < other

    def __contains__(self, item: object) -> bool:
        return item == self.cents


class Anything(int):
    """Equal to all, and less, and in it."""

    __eq__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = lambda *_: True  # type: ignore[assignment]
    __ne__ = lambda *_: False  # type: ignore[assignment] # noqa: E731
    __hash__ = int.__hash__


class Word(str):
    """An honest subclass."""


ASSERTIONS: list[tuple[str, Any, Any]] = [
    ("self.assertEqual(f(), 5)", 5, 4),
    ("self.assertEqual(f(), [1, ('a', b'b'), {'k': None}])", [1, ("a", b"b"), {"k": None}], [1, ("a", b"b"), {}]),
    ("self.assertTrue(f())", [0], []),
    ("self.assertFalse(f())", "", "x"),
    ("self.assertTrue(f() == 'a')", Word("a"), "b"),
    ("self.assertIs(f(), True)", True, 1),
    ("self.assertIn('x', f())", "axb", "ab"),
    ("self.assertGreater(f(), 3)", 4, 3),
    ("self.assertAlmostEqual(f(), 0.1, places=3)", 0.10001, 0.102),
    ("self.assertAlmostEqual(f(), 10, delta=2)", 12, 13),
    ("self.assertCountEqual(f(), [1, 2, 2])", (2, 1, 2), (2, 1, 1)),
    ("with self.assertRaises(ValueError):\n    int(f())", "x", "1"),
    ("with pytest.raises(ValueError, match='invalid') as e:\n    int(f())\nassert 'x' in str(e.value)", "x", "1"),
    ("assert f() == 5, f'{f()}'", 5, 6),
    ("assert f() == pytest.approx([1.0, 2.0])", [1.0000001, 2], [1.1, 2]),
    ("assert f() == pytest.approx(10, abs=1)", 10.5, 11.5),
    ("assert f() and f() > 1", 2, 1),
    ("assert f()[0] == 1 and f()[1] == 2", (1, 2), (1, 3)),
    ("want = 'a'\nassert f() == want\nassert want in f()", "a", "b"),
    ("for have, want in [(1, 2), (2, 4)]:\n    with self.subTest(want=want):\n        assert f(have) == want",
     lambda have: have * 2, lambda have: 2),
    ("for have, want in {1: 2, 2: 4}.items():\n    self.assertEqual(f(have), want)",
     lambda have: have * 2, lambda have: have + 1),
    ("from unittest import mock\nm = mock.Mock()\nm(f(), key=1)\nm.assert_called_once_with('a', key=1)", "a", "b"),
    ("assert f() == 5", Money(5), Money(6)),
    ("assert f() < 5", Money(4), Money(5)),
    ("assert 5 in f()", Money(5), Money(6)),
    ("assert f() == 'a\\u00e9\\udcff'", "a\u00e9\udcff", "a"),
]  # fmt: skip


@pytest.mark.parametrize(("source", "right", "wrong"), ASSERTIONS, ids=[source for source, *_ in ASSERTIONS])
def test_right_values_prove_a_test_and_wrong_ones_do_not(source: str, right: Any, wrong: Any) -> None:
    assert run(source, right if callable(right) else lambda: right).proved == {NAME}
    assert run(source, wrong if callable(wrong) else lambda: wrong).right == frozenset()


@pytest.mark.parametrize("source", [
    "self.assertEqual(f(), 5)", "assert f() == 'a'", "assert f() < 5", "self.assertIn('x', f())",
    "assert f() == [Anything]", "self.assertAlmostEqual(f(), 0.1)",
])  # fmt: skip
def test_a_value_that_is_equal_to_everything_proves_nothing(source: str) -> None:
    assert run(source.replace("Anything", "1"), lambda: Anything(7)).right == frozenset()


@pytest.mark.parametrize(
    "source",
    [
        "if f() == 6:\n    assert f() == 6\nassert f()",
        "try:\n    assert f() == 6\nexcept AssertionError:\n    pass\nassert f() == 5",
        "import contextlib\nwith contextlib.suppress(AssertionError):\n    assert f() == 6\nassert f() == 5",
    ],
)
def test_an_assertion_that_need_not_hold_is_not_asked_for(source: str) -> None:
    assert NAME in run(source, lambda: 5).right


def test_a_test_that_leaves_before_its_assertions_is_not_right() -> None:
    assert run("return\nassert f() == 5", lambda: 5).right == frozenset()


def test_a_test_without_an_assertion_is_right_and_not_proved() -> None:
    assert run("f()", lambda: 5) == Findings(frozenset({NAME}), frozenset())


TABLE = '''"""Doc."""
from __future__ import annotations
import pytest
ALL = [("a", 1), ("b", 2)]
LIMIT = 3

@pytest.mark.parametrize(("n", "want"), [(1, 2), pytest.param(2, 4, id="two"), (3, [6])])
def test_it(n, want):
    assert f(n) == want, want

@pytest.mark.parametrize("key, want", ALL)
def test_named(key, want):
    assert {"a": 1, "b": 2}[key] == want

@pytest.mark.xfail
def test_none():
    assert f(9) == 1

def test_limit():
    assert f(1) < LIMIT
'''


def test_tables_and_constants_of_a_module_hold_no_values_and_the_names_of_its_tests_stay(tmp_path: Path) -> None:
    calc = "\ndef f(n):\n    return [2 * n] if n == 3 else 2 * n if isinstance(n, int) else n\n"
    tests = Blinded({"test_m.py": TABLE + calc})
    text = tests.texts()["test_m.py"]
    assert not re.search(r"LIMIT = 3|, 2\)|, 4|\[6\]", text.replace(calc, ""))
    (tmp_path / "test_m.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", "test_m.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    output = tests.expected.as_written(done.stdout)
    expected = ["test_it[1-2]", "test_it[two]", "test_it[3-want2]", "test_named[a-1]", "test_named[b-2]", "test_limit"]
    names = [f"test_m.py::{name}" for name in expected]
    assert all(f"PASSED {name}\n" in output for name in names), done.stdout
    records = Path(tests.record_path).read_text()
    Path(tests.record_path).unlink()
    found = tests.expected.findings(names, [], records)
    assert found.proved == set(names)
    # A row's record that is missing, wrong, another row's or said to have been computed proves nothing.
    lines = records.splitlines(keepends=True)
    (second,) = [line for line in lines if "test_it[two]" in line]
    for forged in (
        "",
        second.replace('["i", "4"]', '["i", "5"]'),
        second.replace('"token"', '"value"'),
        "[" * 99 + "\n",
    ):
        changed = "".join(lines).replace(second, forged)
        assert f"{names[1]}" not in tests.expected.findings(names, [], changed).right, forged


@pytest.mark.parametrize(
    "name", ["tests/test_m.py::T::test_it", "tests.test_m.T.test_it", "test_it (tests.test_m.T)", "test_m.T.test_it"]
)
def test_a_test_is_known_by_the_name_that_any_runner_gives_it(name: str) -> None:
    source = "class T:\n    def test_it(self):\n        assert f() == 1\n"
    assert Blinded({"tests/test_m.py": source}).expected.findings([name], [], "").right == frozenset()
    assert Blinded({"tests/test_m.py": source}).expected.findings([f"{name}_2"], [], "").right == {f"{name}_2"}


def test_no_candidate_is_told_apart_by_its_place_among_the_others() -> None:
    """The expected value is neither in the middle nor the nearest to the others more often than any other."""
    middles = 0
    for _ in range(400):
        tests = Blinded({"a.py": "def test_a():\n    assert f() == 1000\n"})
        (key,) = tests.expected.sites
        order = sorted(value for value in tests.expected.orders([key])[key] if abs(value) < 10**8)
        middles += abs(order.index(1000) - len(order) // 2) <= 2
    assert middles < 400 * 5 / 30 * 1.6
