"""The judge's side of blinded tests (blinding.py): what they expect, and what the records of a run prove of it."""

import json
import math
import random
import re
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from nemotron_steps.environments.swe.harness import dotted
from nemotron_steps.environments.swe.recorder import HOLD

CANDIDATES = 32
"""Values among which an opaque object has to be equal to the right one alone."""
RECORD_BYTES = 8 * 1024 * 1024

Test = tuple[str, str]
"""(path, "Class.function")"""
Orders = Mapping[str, list[Any]]

OPERATIONS: dict[str, Callable[[Any, Any], bool]] = {
    **HOLD,
    "is": lambda left, right: type(left) is type(right) and left == right,
    "is not": lambda left, right: type(left) is not type(right) or left != right,
    "count": lambda left, right: Counter(map(repr, left)) == Counter(map(repr, right)),
}
"""(recorded, expected) → whether the assertion holds."""

_TOKEN = re.compile(r"v[0-9a-f]{10}")


def new_token() -> str:
    """What stands in the place of a value, or names an assertion."""
    return f"v{secrets.token_hex(5)}"


@dataclass(frozen=True)
class Site:
    """An assertion that is recorded."""

    test: Test
    operation: str
    """Of OPERATIONS, or `almost`."""
    required: bool
    """A test that passed has run it."""
    keys: frozenset[str]
    """Of the expected values that it may be compared with."""
    computed: bool
    """The other side may be one that was computed in there."""
    tolerance: Mapping[str, Any]
    """Of `almost`: arguments of pytest.approx or assertAlmostEqual."""

    def holds(self, recorded: Any, expected: Any) -> bool:
        try:
            if self.operation == "almost":
                return _almost(recorded, expected, self.tolerance)
            return bool(OPERATIONS[self.operation](recorded, expected))
        except (TypeError, ValueError, OverflowError):
            return False


@dataclass(frozen=True)
class Findings:
    """What the records say of tests that are reported as passed: those whose records are there and right, or that have
    none to show; those of them that had something to show; and keys whose values have to be compared among candidates
    before that can be said."""

    right: frozenset[str]
    proved: frozenset[str]
    opaque: frozenset[str] = frozenset()


@dataclass
class Expectations:
    """What blinded tests expect: `expected` by the key of a site, or by the token of a literal."""

    tests: set[Test] = field(default_factory=set)
    sites: dict[str, Site] = field(default_factory=dict)
    expected: dict[str, Any] = field(default_factory=dict)
    shown: dict[str, str] = field(default_factory=dict)
    """Token → how the names of tests write the value."""

    def site(
        self,
        test: Test,
        operation: str,
        required: bool,
        *,
        tolerance: Mapping[str, Any] | None = None,
        keys: Iterable[str] | None = None,
        computed: bool = False,
    ) -> str:
        """The key of one more site; without `keys`, its expected value is under its own key."""
        key = new_token()
        own = frozenset([key] if keys is None else keys)
        self.sites[key] = Site(test, operation, required, own, computed, tolerance or {})
        return key

    def orders(self, opaque: Iterable[str]) -> Orders:
        return {key: _candidates(self.expected[key]) for key in opaque}

    def as_written(self, output: str) -> str:
        """A runner's output with the names of tests as they are without the tokens."""
        return _TOKEN.sub(lambda found: self.shown.get(found[0], found[0]), output)

    def findings(
        self, passed: Iterable[str], others: Iterable[str], records: str, orders: Orders | None = None
    ) -> Findings:
        """What the records of a run prove of tests that its runner reports as `passed`, and `others` as something else.
        Without `orders`, the run had no candidates."""
        by_site: dict[str, list[tuple[str, Any]]] = {}
        broken = len(records) >= RECORD_BYTES
        for line in records.splitlines():
            try:
                site, test, *record = json.loads(line)
                by_site.setdefault(site, []).append((self.as_written(test), record))
            except (ValueError, TypeError, AttributeError, RecursionError):
                broken = True
        sites_of: dict[Test | None, list[str]] = {}
        for key, known in self.sites.items():
            sites_of.setdefault(known.test, []).append(key)
        named = self._named()
        right, proved, opaque, seen = set(), {}, set(), set()
        for name in passed:
            keys = sites_of.get(named(name), [])
            good, found = not (broken and keys), False
            for key in keys:
                mine = [record for where, record in by_site.get(key, ()) if _same_instance(name, where)]
                good = good and bool(mine or not self.sites[key].required)
                for record in mine:
                    held, compared = self._holds(key, record, orders)
                    good, found = good and held is not False, True
                    seen.add(compared)
                    opaque |= {compared} if held is None else set()
            if good and (found or not keys):
                right.add(name)
                if found:
                    proved[name] = keys
        partly = {named(name) for name in others}
        rows = {token for token, text in self.shown.items() if text}
        for name, keys in proved.items():  # each row of a table was there, unless some do not pass
            wanted = {key for site in keys if self.sites[site].required for key in self.sites[site].keys}
            if not wanted & rows <= seen and named(name) not in partly:
                right.discard(name)
        return Findings(frozenset(right), frozenset(right & set(proved)), frozenset(opaque))

    def _named(self) -> Callable[[str], Test | None]:
        """Finds the test that a runner calls so, in the words of pytest or of unittest."""
        by_end: dict[str, Test] = {}  # unittest's name and each of its ends
        for path, test in self.tests:
            parts = [*path.removesuffix(".py").split("/"), *test.split(".")]
            by_end |= {".".join(parts[begin:]): (path, test) for begin in range(len(parts))}

        def find(name: str) -> Test | None:
            name = dotted(name.split("[")[0])
            path, *parts = name.split("::")
            test = (path, ".".join(parts))
            if parts:
                return test if test in self.tests else None
            return by_end.get(name)

        return find

    def _holds(self, key: str, record: Any, orders: Orders | None) -> tuple[bool | None, str]:
        """(whether a record is right, None where candidates have to be tried; the key of what it was compared to)"""
        site = self.sites[key]
        try:
            (kind, left), (how, *rest), *bits = record
            if how == "value":
                (other_kind, other), held = rest
                if kind == other_kind == "plain":
                    held = site.holds(_plain(left), _plain(other))
                return site.computed and held is True, ""
            (to,) = rest
            if to not in site.keys:
                return False, ""
            expected = self.expected[to]
            if kind == "plain":
                return site.holds(_plain(left), expected), to
            if site.operation in ("is", "is not"):
                return site.operation == "is not", to  # no literal
            if orders is None:
                return None, to
            # An opaque object has to compare as it must with the expected value among its candidates.
            order = orders[to]
            is_it = [type(value) is type(expected) and value == expected for value in order]
            if site.operation in ("==", "has"):
                return any(is_it) and bits[0] == is_it, to
            ordered = site.operation in ("<", "<=", ">", ">=")
            return bits[0][is_it.index(True)] is True and (not ordered or False in bits[0]), to
        except (ValueError, TypeError, KeyError, IndexError, RecursionError):
            return False, ""


def _same_instance(name: str, recorded_in: str) -> bool:
    """Whether a record is of this row of pytest's table."""
    if "[" not in name or "[" not in recorded_in:
        return True
    return recorded_in.rpartition(" (")[0].partition("[")[2] == name.partition("[")[2]


_KINDS: dict[str, Callable[[Any], Any]] = {
    "i": int, "f": float, "c": complex, "s": str, "b": bytes.fromhex,
    "list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "d": dict,
}  # fmt: skip


def _plain(value: Any) -> Any:
    """A recorded value."""
    if value is None or isinstance(value, bool):
        return value
    kind, content = value
    if kind == "d":
        content = [(_plain(key), _plain(item)) for key, item in content]
    elif len(kind) > 1:
        content = [_plain(item) for item in content]
    return _KINDS[kind](content)


def _almost(recorded: Any, expected: Any, tolerance: Mapping[str, Any]) -> bool:
    """As assertAlmostEqual and pytest.approx."""
    if isinstance(expected, dict):
        if recorded.keys() != expected.keys():
            return False
        return all(_almost(recorded[key], value, tolerance) for key, value in expected.items())
    if isinstance(expected, list | tuple):
        if len(recorded) != len(expected):
            return False
        return all(_almost(one, other, tolerance) for one, other in zip(recorded, expected, strict=True))
    if recorded == expected or not isinstance(expected, int | float | complex):
        return bool(recorded == expected)
    difference: float = abs(recorded - expected)
    if "places" in tolerance:
        return bool(round(difference, tolerance["places"]) == 0)
    if "delta" in tolerance:
        return bool(difference <= tolerance["delta"])
    least = 1e-12 if tolerance["abs"] is None else tolerance["abs"]
    share = tolerance["rel"] if tolerance["rel"] is not None else (1e-6 if tolerance["abs"] is None else 0.0)
    return bool(math.isfinite(difference) and difference <= max(least, share * abs(expected)))


def _candidates(value: Any) -> list[Any]:
    """A value among others of its kind, shuffled. All of them are as far from one that is not among them, so that none
    is in the middle."""
    draw = random.SystemRandom()

    def away(origin: Any) -> Any:
        for _ in range(3):
            origin = _other(origin, draw)
        return origin

    middle, found = away(value), [value]
    if isinstance(value, int | float) and not isinstance(value, bool):
        found += [-(10**9), 10**9]
    for _ in range(8 * CANDIDATES):
        other = away(middle)
        if len(found) < CANDIDATES and all(type(other) is not type(one) or other != one for one in found):
            found.append(other)
    draw.shuffle(found)
    return found


def _other(value: Any, draw: random.SystemRandom) -> Any:
    """A value like this one that is another."""
    if value is None or value is ... or isinstance(value, bool):
        return draw.choice([True, False, None, 0, 1, ""])
    if isinstance(value, int):
        return value + draw.choice([-1, 1]) * draw.randint(1, max(20, abs(value) // 4))
    if isinstance(value, float):
        return value + draw.choice([-1.0, 1.0]) * draw.randint(1, 40) * max(0.25, abs(value) / 32)
    if isinstance(value, complex):
        return complex(_other(value.real, draw), value.imag)
    if isinstance(value, bytes):
        return _other(value.decode("latin-1"), draw).encode("latin-1")
    if isinstance(value, dict):
        pairs = list(value.items()) or [(draw.randint(0, 99), draw.randint(0, 99))]
        key, item = draw.choice(pairs)
        return {**value, (key if draw.random() < 0.5 else _other(key, draw)): _other(item, draw)}
    items = list(value)
    at = draw.randrange(len(items) + 1)
    end = at + draw.randint(0, 1)
    if isinstance(value, str):
        return value[:at] + draw.choice("abcdefghijklmnopqrstuvwxyz0123456789") + value[end:]
    new = _other(draw.choice(items), draw) if items else draw.randint(0, 99)
    return type(value)([*items[:at], new, *items[end:]])
