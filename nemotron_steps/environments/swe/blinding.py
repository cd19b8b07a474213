"""Hidden tests without the values that they expect: what runs beside the judged code cannot be its judge.

The code under test runs in the process of its tests and can make every assertion hold and every report say `passed`.
So the comparison leaves that process. An assertion against a literal becomes a call that records its other side:

    self.assertEqual(add(2, 3), 5)      ->   R("s1", add(2, 3))           5 stays with the judge
    for a, want in [(1, 3), (2, 4)]:    ->   for a, want in [(1, "t1"), (2, "t2")]:
        assert f(a) == want             ->       R("s2", f(a), want)      and so do 3 and 4

The records are plain data and are compared outside, with what has never been inside. Whoever forges the runner's report
or a record gains nothing by it: he would have to know the value. Recorded are also

- two computed sides (`f(x) == g(y)`): both;
- any other condition, as true or false, negated at random: a recorder that always says the same is found out;
- what a block that must raise has raised.

A value that is not plain data, an object with an `==` of its own, cannot be compared outside. It is compared in another
run, in a fresh sandbox, with CANDIDATES values of which one is the expected one, in an order that only the judge knows.

What cannot be proved in this way (docs/swe.md says what) is left as it was written.
"""

from __future__ import annotations

import ast
import json
import math
import random
import re
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from nemotron_steps.environments.swe.harness import dotted
from nemotron_steps.environments.swe.recorder import HOLD

CANDIDATES = 32
"""Values among which an opaque object has to be equal to the right one alone."""
RECORD_BYTES = 8 * 1024 * 1024
"""Of all records of a run."""

Orders = Mapping[str, list[Any]]
"""Key → its candidates in the order of a run."""

_EQUAL = {f"assert{kind}Equal" for kind in ("", "List", "Tuple", "Dict", "Set", "MultiLine")} | {"assertEquals"}
_COMPARE: dict[type[ast.cmpop], str] = {
    ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=",
    ast.In: "in", ast.NotIn: "not in", ast.Is: "is", ast.IsNot: "is not",
}  # fmt: skip
_METHODS = {
    **dict.fromkeys(_EQUAL, "=="),
    **{"assertNotEqual": "!=", "assertLess": "<", "assertLessEqual": "<=", "assertGreater": ">"},
    **{"assertGreaterEqual": ">=", "assertIn": "in", "assertNotIn": "not in", "assertIs": "is"},
    **{"assertIsNot": "is not", "assertAlmostEqual": "almost", "assertCountEqual": "count"},
}
_MIRRORED = {"==": "==", "!=": "!=", "<": ">", "<=": ">=", ">": "<", ">=": "<=", "almost": "almost", "count": "count"}
_RAISES = frozenset({"raises", "assertRaises", "assertRaisesRegex", "assertRaisesRegexp", "assertRaisesMessage"})
_OF_MOCKS = frozenset({"assert_called_with", "assert_called_once_with"})
_MIRRORED |= {"in": "has", "not in": "has not", "is": "is", "is not": "is not"}

OPERATIONS: dict[str, Callable[[Any, Any], bool]] = {
    **HOLD,
    "is": lambda left, right: type(left) is type(right) and left == right,
    "is not": lambda left, right: type(left) is not type(right) or left != right,
    "count": lambda left, right: _counted(left) == _counted(right),
}
"""(recorded, expected) → whether the assertion holds."""

_RECORDER = Path(__file__).with_name("recorder.py")


@dataclass(frozen=True)
class Site:
    """An assertion that is recorded.

    Attributes:
        test: (path, "Class.function") of its test.
        operation: of OPERATIONS, or `almost`.
        required: a test that passed has run it.
        keys: of the expected values that it may be compared with.
        computed: the other side may be one that was computed in there.
        tolerance: of `almost`: arguments of pytest.approx or assertAlmostEqual.
    """

    test: tuple[str, str]
    operation: str
    required: bool
    keys: frozenset[str] = frozenset()
    computed: bool = False
    tolerance: Mapping[str, Any] = field(default_factory=dict)

    def holds(self, recorded: Any, expected: Any) -> bool:
        """Whether the assertion holds. It does not where the two cannot be compared."""
        try:
            if self.operation == "almost":
                return _almost(recorded, expected, self.tolerance)
            return bool(OPERATIONS[self.operation](recorded, expected))
        except (TypeError, ValueError, OverflowError):
            return False


@dataclass(frozen=True)
class Findings:
    """What the records say of tests that are reported as passed.

    Attributes:
        right: those whose records are there and right, or that have none to show.
        proved: those of them that had something to show.
        opaque: keys whose values have to be compared among candidates before `right` can be said.
    """

    right: frozenset[str]
    proved: frozenset[str]
    opaque: frozenset[str] = frozenset()


class Blinded:
    """Test modules without the values that they expect.

    Args:
        texts: path in the repository → source. One that is not UTF-8 or does not parse is left as it is.
    """

    def __init__(self, texts: Mapping[str, str]) -> None:
        self.record_path = f"/tmp/{_token()}"
        self.sites: dict[str, Site] = {}
        self.tests: set[tuple[str, str]] = set()
        self.expected: dict[str, Any] = {}
        self.shown: dict[str, str] = {}
        self.name = f"check_{secrets.token_hex(4)}"
        self._sources = {path: text.encode() for path, text in texts.items() if "\ufffd" not in text}
        self._edits: dict[str, list[tuple[int, int, str]]] = {}
        self.rows: set[str] = set()
        for path, source in self._sources.items():
            try:
                tree = ast.parse(source)
            except (SyntaxError, ValueError, RecursionError):
                continue
            if edits := _Module(self, path, source, tree).edits():
                self._edits[path] = edits
        self._named: dict[str, tuple[str, str]] = {}  # by unittest's name and each of its ends
        for path, test in self.tests:
            parts = [*path.removesuffix(".py").split("/"), *test.split(".")]
            self._named |= {".".join(parts[begin:]): (path, test) for begin in range(len(parts))}
        self._sites_of: dict[tuple[str, str] | None, list[str]] = {}
        for key, site in self.sites.items():
            self._sites_of.setdefault(site.test, []).append(key)

    def orders(self, opaque: Iterable[str]) -> Orders:
        """Candidates for the values of these keys."""
        return {key: _candidates(self.expected[key]) for key in opaque}

    def texts(self, orders: Orders | None = None) -> dict[str, str]:
        """Path → source of the modules that are not as they were, with candidates if there are any."""
        known = {
            "PATH": self.record_path,
            "OPERATIONS": {key: site.operation for key, site in self.sites.items()},
            "TOKENS": [*self.shown],
            "CANDIDATES": orders or {},
        }
        recorder = f"{self.name} = {known!r}; exec({_RECORDER.read_text()!r}, {self.name})\n"
        found = {}
        for path, edits in self._edits.items():
            source = self._sources[path]
            for begin, end, new in sorted(edits, reverse=True):
                text = new.replace(_PRELUDE, recorder)
                source = source[:begin] + text.encode() + source[end:]
            found[path] = source.decode()
        return found

    def as_written(self, output: str) -> str:
        """A runner's output with the names of tests as they are without the tokens."""
        return _TOKEN.sub(lambda found: self.shown.get(found[0], found[0]), output)

    def findings(
        self, passed: Iterable[str], others: Iterable[str], records: str, orders: Orders | None = None
    ) -> Findings:
        """What the records of a run prove."""
        by_site: dict[str, list[tuple[str, Any]]] = {}
        broken = len(records) >= RECORD_BYTES
        for line in records.splitlines():
            try:
                site, test, *record = json.loads(line)
                by_site.setdefault(site, []).append((self.as_written(test), record))
            except (ValueError, TypeError, AttributeError, RecursionError):
                broken = True
        partly = {self._test_of(name) for name in others}
        right, proved, opaque, seen = set(), {}, set(), set()
        for name in passed:
            test = self._test_of(name)
            keys = self._sites_of.get(test, [])
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
                    proved[name] = test
        for name, test in proved.items():  # each row of a table was there, unless some do not pass
            sites = [self.sites[key] for key in self._sites_of[test]]
            wanted = {key for site in sites if site.required for key in site.keys}
            if not wanted & self.rows <= seen and test not in partly:
                right.discard(name)
        return Findings(frozenset(right), frozenset(right & set(proved)), frozenset(opaque))

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
            if kind == "plain":
                return site.holds(_plain(left), self.expected[to]), to
            if site.operation in ("is", "is not"):
                return site.operation == "is not", to  # no literal
            if orders is None:
                return None, to
            return self._singled_out(site.operation, orders[to], self.expected[to], bits[0]), to
        except (ValueError, TypeError, KeyError, IndexError, RecursionError):
            return False, ""

    @staticmethod
    def _singled_out(operation: str, order: Sequence[Any], expected: Any, bits: Sequence[Any]) -> bool:
        """Whether an opaque object compares as it must with the expected value among its candidates."""
        there = next(n for n, value in enumerate(order) if type(value) is type(expected) and value == expected)
        if operation in ("==", "has"):
            return [*bits] == [number == there for number in range(len(order))]
        return bits[there] is True and (operation not in ("<", "<=", ">", ">=") or False in bits)

    def _test_of(self, name: str) -> tuple[str, str] | None:
        """The test that a runner calls so, in the words of pytest or of unittest."""
        name = dotted(name.split("[")[0])
        path, *parts = name.split("::")
        if parts:
            return (path, ".".join(parts)) if (path, ".".join(parts)) in self.tests else None
        return self._named.get(name)


_PRELUDE = "\0the recorder"


@dataclass
class _Condition:
    """One thing that an assertion asks for: `left operation right`, or that `left` is true (or, negated, false)."""

    left: ast.expr
    operation: str = ""
    right: ast.expr | None = None
    negated: bool = False
    tolerance: dict[str, Any] = field(default_factory=dict)

    def name(self) -> ast.Name | None:
        """The variable that is compared with, if no side is a literal."""
        sides = [self.right, self.left] if self.operation in _MIRRORED and self.right is not None else []
        if any(side is not None and _is_literal(side) for side in sides):
            return None
        return next((side for side in sides if isinstance(side, ast.Name)), None)


@dataclass
class _Assertion:
    statement: ast.stmt
    conditions: list[_Condition]
    required: bool


class _Names:
    """The variables of a function or of a module that are used for nothing but to be compared with."""

    def __init__(self, tree: ast.AST) -> None:
        self.cells: dict[str, list[tuple[ast.expr, str]]] = {}  # name → (literal, how pytest's names write it)
        self.mixed: set[str] = set()  # names that hold something else than a literal, too
        self.harmless: set[int] = set()  # loads that are compared with, or shown to no one
        self._loads: dict[str, set[int]] = {}
        self._stores: dict[str, int] = {}
        self._explained: dict[str, int] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                self._loads.setdefault(node.id, set()).add(id(node))
            elif isinstance(node, ast.Name):
                self._stores[node.id] = self._stores.get(node.id, 0) + 1
            elif isinstance(node, ast.arg | ast.alias | ast.ExceptHandler | ast.FunctionDef | ast.ClassDef):
                name = node.arg if isinstance(node, ast.arg) else getattr(node, "asname", None) or node.name
                self._stores[name or ""] = self._stores.get(name or "", 0) + 1
            elif isinstance(node, ast.Global | ast.Nonlocal):
                self._stores |= dict.fromkeys(node.names, 1 << 30)
            elif isinstance(node, ast.Call) and _called(node) == "subTest":
                self.harmless |= {id(inner) for inner in ast.walk(node)}

    def bind(self, name: str, cells: Sequence[tuple[ast.expr, str]], stored: int = 1) -> None:
        """One place that stores so many values under a name, these literals among them."""
        self.cells.setdefault(name, []).extend(cells)
        if len(cells) < stored:
            self.mixed.add(name)
        self._explained[name] = self._explained.get(name, 0) + 1

    def blind(self) -> dict[str, tuple[list[tuple[ast.expr, str]], bool]]:
        """Names whose values need not be in there: their literals, and whether they hold something else, too."""
        return {
            name: (cells, name in self.mixed)
            for name, cells in self.cells.items()
            if cells
            and self._explained[name] == self._stores.get(name)
            and self._loads.get(name, set()) <= self.harmless
        }


class _Module:
    """What is edited in one module."""

    def __init__(self, blinded: Blinded, path: str, source: bytes, tree: ast.Module) -> None:
        self._to, self._path, self._source, self._tree = blinded, path, source, tree
        self._starts = [0]
        for line in source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self._edits: dict[int, tuple[int, int, str]] = {}
        self._keys: dict[int, str] = {}  # literal → the token in its place
        self._globals = _Names(tree)
        self._loaded: Counter[str] = Counter()

    def edits(self) -> list[tuple[int, int, str]]:
        """(begin, end, new text) in bytes of the source; none where there is nothing to record."""
        tables: dict[str, ast.expr] = {}
        for node in self._tree.body:
            inner = node.body if isinstance(node, ast.ClassDef) else []
            for prefix, each in (("", node), *(("self.", statement) for statement in inner)):
                if isinstance(each, ast.Assign) and len(each.targets) == 1 and isinstance(each.targets[0], ast.Name):
                    tables[prefix + each.targets[0].id] = each.value
                    if not prefix:
                        self._globals.bind(each.targets[0].id, [(each.value, "")] if _is_literal(each.value) else [])
        for loaded in ast.walk(self._tree):
            if isinstance(loaded, ast.Name | ast.Attribute) and isinstance(loaded.ctx, ast.Load):
                self._loaded[loaded.id if isinstance(loaded, ast.Name) else f"self.{loaded.attr}"] += 1
        functions = list(_test_functions(self._tree.body, ""))
        scanned = []
        for name, function in functions:
            names = _Names(function)
            assertions = list(_assertions(function.body, not _may_leave(function)))
            self._bind(names, function, tables)
            for condition in (c for a in assertions for c in a.conditions):
                self._globals.harmless.add(id(condition.name()))
                names.harmless.add(id(condition.name()))
            for assertion in assertions:  # messages are not kept
                names.harmless |= {id(n) for m in _messages(assertion.statement) for n in ast.walk(m)}
            scanned.append((name, names, assertions))
        for name, names, assertions in scanned:
            self._to.tests.add((self._path, name))
            blind = {**self._globals.blind(), **names.blind()}
            for assertion in assertions:
                self._assertion((self._path, name), assertion, blind)
        if not self._edits:
            return []
        first = next(node for node in self._tree.body if not _is_head(node))
        begin = self._starts[min([first.lineno, *(d.lineno for d in getattr(first, "decorator_list", []))]) - 1]
        return [*self._edits.values(), (begin, begin, _PRELUDE)]

    def _bind(self, names: _Names, function: ast.AST, tables: Mapping[str, ast.expr]) -> None:
        """Where a test's variables get literals from: assignments, loops over tables, pytest's tables."""

        def rows(node: ast.expr) -> list[ast.expr] | None:
            if isinstance(node, ast.Call) and _called(node) == "items" and isinstance(node.func, ast.Attribute):
                table = rows(node.func.value)
                return None if table is None or not isinstance(named(node.func.value), ast.Dict) else table
            node = named(node)
            if isinstance(node, ast.Dict) and None not in node.keys:
                return [ast.Tuple([key, value]) for key, value in zip(node.keys, node.values, strict=True) if key]
            return node.elts if isinstance(node, ast.List | ast.Tuple) else None

        def named(node: ast.expr) -> ast.expr:
            name = node.id if isinstance(node, ast.Name) else f"self.{node.attr}" if _is_own(node) else ""
            return tables[name] if name in tables and self._loaded[name] == 1 else node

        def columns(targets: Sequence[str], table: Sequence[ast.expr]) -> None:
            for column, target in enumerate(targets):
                cells = []
                for number, row in enumerate(table):
                    if isinstance(row, ast.Call) and _called(row) == "param":
                        parts: Sequence[ast.expr] = row.args
                    else:
                        parts = [row] if len(targets) == 1 else getattr(row, "elts", [])
                    if len(parts) == len(targets) and _is_literal(parts[column]):
                        cells.append((parts[column], _test_id(ast.literal_eval(parts[column]), target, number)))
                names.bind(target, cells, len(table))

        for node in ast.walk(function):
            if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
                names.bind(node.targets[0].id, [(node.value, "")] if _is_literal(node.value) else [])
            elif isinstance(node, ast.For) and (table := rows(node.iter)) is not None:
                elements = node.target.elts if isinstance(node.target, ast.Tuple) else [node.target]
                columns([e.id if isinstance(e, ast.Name) else "" for e in elements], table)
            elif isinstance(node, ast.Call) and _called(node) == "parametrize" and _is_literal(node.args[0]):
                table = rows(node.args[1]) if len(node.args) > 1 else None
                given = ast.literal_eval(node.args[0])
                targets = [each.strip() for each in given.split(",")] if isinstance(given, str) else given
                columns([target for target in targets if target], table or [])

    def _assertion(self, test: tuple[str, str], assertion: _Assertion, blind: Mapping[str, Any]) -> None:
        statement = assertion.statement
        if isinstance(statement, ast.With | ast.AsyncWith):
            for item in statement.items:
                if _raises(item.context_expr):
                    key, negated = self._site(test, "is", assertion.required), random.SystemRandom().random() < 0.5
                    self._to.expected[key] = not negated
                    block = self._text(item.context_expr)
                    self._edit(item.context_expr, f"{self._to.name}['Raises']({key!r}, {block}, {negated})")
            return
        calls = [self._call(test, assertion.required, condition, blind) for condition in assertion.conditions]
        self._edit(statement, "; ".join(calls))

    def _call(self, test: tuple[str, str], required: bool, condition: _Condition, blind: Mapping[str, Any]) -> str:
        left, right, operation = condition.left, condition.right, condition.operation
        for here, there, name in ((left, right, operation), (right, left, _MIRRORED.get(operation, ""))):
            if there is None or here is None or not name:
                continue
            if _is_literal(there):
                key = self._site(test, name, required, condition.tolerance)
                self._to.expected[key] = ast.literal_eval(there)
                return f"{self._to.name}['record']({key!r}, ({self._text(here)}))"
            if isinstance(there, ast.Name) and there is condition.name() and blind.get(there.id):
                cells, mixed = blind[there.id]
                keys = [self._token(cell, shown) for cell, shown in cells]
                key = self._site(test, name, required, condition.tolerance, keys, computed=mixed)
                return f"{self._to.name}['record']({key!r}, ({self._text(here)}), {there.id})"
        if operation == "==" and right is not None:
            key = self._site(test, operation, required, keys=(), computed=True)
            return f"{self._to.name}['record']({key!r}, ({self._text(left)}), ({self._text(right)}))"
        negated = random.SystemRandom().random() < 0.5
        key = self._site(test, "is", required)
        self._to.expected[key] = condition.negated is negated
        told = self._text(left) if right is None else f"({self._text(left)}) {operation} ({self._text(right)})"
        return f"{self._to.name}['record']({key!r}, {'not ' if negated else 'bool'}({told}))"

    def _site(
        self,
        test: tuple[str, str],
        operation: str,
        required: bool,
        tolerance: Mapping[str, Any] | None = None,
        keys: Iterable[str] | None = None,
        computed: bool = False,
    ) -> str:
        key = _token()
        own = frozenset([key] if keys is None else keys)
        self._to.sites[key] = Site(test, operation, required, own, computed, tolerance or {})
        return key

    def _token(self, cell: ast.expr, shown: str) -> str:
        """What stands in the place of a literal."""
        if id(cell) not in self._keys:
            token = self._keys[id(cell)] = _token()
            if shown:
                self._to.rows.add(token)
            self._to.expected[token], self._to.shown[token] = ast.literal_eval(cell), shown
            self._edit(cell, repr(token))
        return self._keys[id(cell)]

    def _edit(self, node: ast.expr | ast.stmt, text: str) -> None:
        self._edits[id(node)] = (*self._span(node), text)

    def _text(self, node: ast.expr) -> str:
        if getattr(node, "end_lineno", None) is None:  # of a mock
            assert isinstance(node, ast.Attribute)
            own = f"({self._text(node.value)}).{node.attr}"
            return own if node.attr == "call_count" else f"(tuple({own}[0]), dict({own}[1]))"
        begin, end = self._span(node)
        return self._source[begin:end].decode()

    def _span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self._starts[node.lineno - 1] + node.col_offset, self._starts[node.end_lineno - 1] + node.end_col_offset


def _test_functions(
    body: Iterable[ast.stmt], prefix: str
) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from _test_functions(node.body, f"{prefix}{node.name}.")
        elif (
            isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            and node.name.startswith("test")
            and not any(_called(decorator) in ("xfail", "expectedFailure") for decorator in node.decorator_list)
        ):
            yield prefix + node.name, node


def _assertions(body: Iterable[ast.stmt], required: bool) -> Iterator[_Assertion]:
    """Those of a test that are run by it and not caught."""
    for node in body:
        if conditions := _conditions(node):
            yield _Assertion(node, conditions, required)
        elif isinstance(node, ast.With | ast.AsyncWith):
            if any(_raises(item.context_expr) for item in node.items):
                yield _Assertion(node, [], required)
            elif not any(_called(item.context_expr) == "suppress" for item in node.items):
                yield from _assertions(node.body, required)
        elif isinstance(node, ast.For | ast.AsyncFor):
            yield from _assertions(node.body, required and isinstance(node.iter, ast.List | ast.Tuple | ast.Name))
        elif isinstance(node, ast.While):
            yield from _assertions(node.body, False)
        elif isinstance(node, ast.If):
            yield from _assertions([*node.body, *node.orelse], False)
        elif isinstance(node, ast.Try) and not node.handlers:
            yield from _assertions([*node.body, *node.finalbody], required)


def _conditions(node: ast.stmt) -> list[_Condition]:
    """What a statement asserts, as far as it is understood."""
    if isinstance(node, ast.Assert):
        return list(_parts(node.test))
    if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        return []
    call, name = node.value, _called(node.value)
    if name in _OF_MOCKS and isinstance(call.func, ast.Attribute) and all(map(_is_literal, call.args)):
        return _of_mock(call.func.value, name, call)
    if not _is_own(call.func) or any(isinstance(each, ast.Starred) for each in call.args) or not call.args:
        return []
    if name in ("assertTrue", "assertFalse"):
        return list(_parts(call.args[0])) if name == "assertTrue" else [_Condition(call.args[0], negated=True)]
    if name in ("assertIsNone", "assertIsNotNone"):
        none = ast.Constant(None)
        return [_Condition(call.args[0], "is" if name == "assertIsNone" else "is not", none)]
    if name not in _METHODS or len(call.args) < 2:
        return []
    left, right, tolerance = *call.args[:2], {}
    if name == "assertAlmostEqual":
        given = [*zip(("places", "msg", "delta"), call.args[2:], strict=False)]
        given += [(keyword.arg or "", keyword.value) for keyword in call.keywords]
        given = [(key, value) for key, value in given if key in ("places", "delta")]
        tolerance = {key: ast.literal_eval(value) for key, value in given if _is_literal(value)} or {"places": 7}
        if len(given) > 1 or not all(_is_literal(value) for _, value in given):
            return []
    operation = _METHODS[name]
    known = _is_literal(left) or _is_literal(right)
    if operation in ("almost", "count") and not known:
        return []  # both sides are the process's own
    return [_Condition(left, operation, right, tolerance=tolerance)]


def _of_mock(mock: ast.expr, name: str, call: ast.Call) -> list[_Condition]:
    """assert_called_with and its like: the literals that it was called with."""
    if not all(keyword.arg and _is_literal(keyword.value) for keyword in call.keywords):
        return []
    keywords = ast.Dict([ast.Constant(keyword.arg) for keyword in call.keywords], [k.value for k in call.keywords])
    given = ast.Tuple([ast.Tuple(call.args, ast.Load()), keywords], ast.Load())
    conditions = [_Condition(ast.Attribute(mock, "call_args", ast.Load()), "==", given)]
    if "once" in name:
        conditions.append(_Condition(ast.Attribute(mock, "call_count", ast.Load()), "==", ast.Constant(1)))
    return conditions


def _parts(test: ast.expr) -> Iterator[_Condition]:
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        for value in test.values:
            yield from _parts(value)
    elif isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield _Condition(test.operand, negated=True)
    elif isinstance(test, ast.Compare) and len(test.ops) == 1:
        left, operation, right = test.left, _COMPARE[type(test.ops[0])], test.comparators[0]
        tolerance = {}
        if isinstance(right, ast.Call) and _called(right) == "approx" and operation == "==" and len(right.args) == 1:
            given = {keyword.arg or "": keyword.value for keyword in right.keywords}
            if _is_literal(right.args[0]) and set(given) <= {"rel", "abs"} and all(map(_is_literal, given.values())):
                tolerance = {"rel": None, "abs": None, **{key: ast.literal_eval(v) for key, v in given.items()}}
                operation, right = "almost", right.args[0]
        if operation in ("is", "is not") and not _is_literal(right):
            yield _Condition(test)
        else:
            yield _Condition(left, operation, right, tolerance=tolerance)
    else:
        yield _Condition(test)


def _messages(node: ast.stmt) -> list[ast.expr]:
    """What an assertion says when it fails."""
    if isinstance(node, ast.Assert):
        return [node.msg] if node.msg else []
    call = node.value if isinstance(node, ast.Expr) else None
    if not isinstance(call, ast.Call):
        return []
    kept = 1 if _called(call) in ("assertTrue", "assertFalse", "assertIsNone", "assertIsNotNone") else 2
    return [*call.args[kept:], *(keyword.value for keyword in call.keywords)]


def _called(node: ast.AST) -> str:
    """The last name of what is called, or of a decorator."""
    function = node.func if isinstance(node, ast.Call) else node
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _is_own(node: ast.AST) -> TypeGuard[ast.Attribute]:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def _raises(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and _called(node) in _RAISES


def _is_literal(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False
    return True


def _is_head(node: ast.stmt) -> bool:
    """What has to stay in front: the docstring, imports from __future__."""
    if isinstance(node, ast.ImportFrom):
        return node.module == "__future__"
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _may_leave(function: ast.AST) -> bool:
    """Whether a test may end before its last line and still pass."""
    return any(
        isinstance(node, ast.Return | ast.Yield | ast.YieldFrom | ast.Break | ast.Continue)
        or (isinstance(node, ast.Call) and _called(node) in ("skip", "skipTest", "importorskip", "xfail"))
        for node in ast.walk(function)
    )


def _test_id(value: Any, argument: str, row: int) -> str:
    """How pytest writes a value in a test's name."""
    if isinstance(value, str) and value:
        return value.encode("unicode_escape").decode()
    if isinstance(value, bytes):
        return value.decode("latin-1").encode("unicode_escape").decode()
    return str(value) if value is None or isinstance(value, bool | int | float | complex) else f"{argument}{row}"


def _same_instance(name: str, recorded_in: str) -> bool:
    """Whether a record is of this row of pytest's table."""
    if "[" not in name or "[" not in recorded_in:
        return True
    return recorded_in.rpartition(" (")[0].partition("[")[2] == name.partition("[")[2]


def _token() -> str:
    return f"v{secrets.token_hex(5)}"


_TOKEN = re.compile(r"v[0-9a-f]{10}")


def _plain(value: Any) -> Any:
    """A recorded value."""
    if value is None or isinstance(value, bool):
        return value
    kind, content = value
    if kind in _SCALARS:
        return _SCALARS[kind](content)
    if kind == "d":
        return {_plain(key): _plain(item) for key, item in content}
    return _CONTAINERS[kind](_plain(item) for item in content)


_SCALARS: dict[str, Callable[[str], Any]] = {"i": int, "f": float, "c": complex, "s": str, "b": bytes.fromhex}
_CONTAINERS: dict[str, Callable[[Iterable[Any]], Any]] = {
    "list": list, "tuple": tuple, "set": set, "frozenset": frozenset
}  # fmt: skip


def _counted(items: Any) -> list[tuple[str, int]]:
    return sorted(Counter(map(repr, items)).items())


def _almost(recorded: Any, expected: Any, tolerance: Mapping[str, Any]) -> bool:
    """As assertAlmostEqual and pytest.approx."""
    if isinstance(expected, dict):
        return recorded.keys() == expected.keys() and all(
            _almost(recorded[key], value, tolerance) for key, value in expected.items()
        )
    if isinstance(expected, list | tuple):
        return len(recorded) == len(expected) and all(
            _almost(one, other, tolerance) for one, other in zip(recorded, expected, strict=True)
        )
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
    if isinstance(value, str):
        at = draw.randrange(len(value) + 1)
        return value[:at] + draw.choice("abcdefghijklmnopqrstuvwxyz0123456789") + value[at + draw.randint(0, 1) :]
    if isinstance(value, bytes):
        return _other(value.decode("latin-1"), draw).encode("latin-1")
    if isinstance(value, dict):
        pairs = list(value.items()) or [(draw.randint(0, 99), draw.randint(0, 99))]
        key, item = draw.choice(pairs)
        return {**value, (key if draw.random() < 0.5 else _other(key, draw)): _other(item, draw)}
    items = list(value)
    at = draw.randrange(len(items) + 1)
    new = _other(draw.choice(items), draw) if items else draw.randint(0, 99)
    return type(value)([*items[:at], new, *items[at + draw.randint(0, 1) :]])
