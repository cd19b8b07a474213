"""Hidden tests without the values that they expect: what runs beside the judged code cannot be its judge.

The code under test runs in the process of its tests and can make every assertion hold and every report say `passed`.
So the comparison leaves that process. An assertion against a literal becomes a call that records its other side:

    self.assertEqual(add(2, 3), 5)      ->   R("s1", add(2, 3))           5 stays with the judge
    for a, want in [(1, 3), (2, 4)]:    ->   for a, want in [(1, "t1"), (2, "t2")]:
        assert f(a) == want             ->       R("s2", f(a), want)      and so do 3 and 4

The records are plain data and are compared outside (expectations.py), with what has never been inside. Who forges the
runner's report or a record gains nothing by it: he would have to know the value. Recorded are also

- two computed sides (`f(x) == g(y)`): both;
- any other condition, as true or false, negated at random: a recorder that always says the same is found out;
- what a block that must raise has raised.

A value that is not plain data, an object with an `==` of its own, cannot be compared outside. It is compared in another
run, in a fresh sandbox, with CANDIDATES values of which one is the expected one, in an order that only the judge knows.

What cannot be proved in this way (docs/swe.md says what) is left as it was written.
"""

import ast
import random
import secrets
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from nemotron_steps.environments.swe.expectations import Expectations, Orders, Test, new_token

Cell = tuple[ast.expr, str]
"""A literal, and how pytest's names write it."""
_Blind = Mapping[str, tuple[list[Cell], bool]]
"""Names whose values need not be in there: their literals, and whether they hold something else, too."""

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

_RECORDER = Path(__file__).with_name("recorder.py")
_PRELUDE = "\0the recorder"


class Blinded:
    """Test modules (path in the repository → source) without the values that they expect, which are in `expected`.

    A module that is not UTF-8 or does not parse is left as it is.
    """

    def __init__(self, texts: Mapping[str, str]) -> None:
        self.record_path = f"/tmp/{new_token()}"
        self.expected = Expectations()
        self._name = f"check_{secrets.token_hex(4)}"
        self._sources = {path: text.encode() for path, text in texts.items() if "\ufffd" not in text}
        self._edits: dict[str, list[tuple[int, int, str]]] = {}
        for path, source in self._sources.items():
            try:
                tree = ast.parse(source)
            except (SyntaxError, ValueError, RecursionError):
                continue
            if edits := _Module(self.expected, self._name, path, source, tree).edits():
                self._edits[path] = edits

    def texts(self, orders: Orders | None = None) -> dict[str, str]:
        """Path → source of the modules that are not as they were, with candidates if there are any."""
        known = {
            "PATH": self.record_path,
            "OPERATIONS": {key: site.operation for key, site in self.expected.sites.items()},
            "TOKENS": [*self.expected.shown],
            "CANDIDATES": orders or {},
        }
        recorder = f"{self._name} = {known!r}; exec({_RECORDER.read_text()!r}, {self._name})\n"
        found = {}
        for path, edits in self._edits.items():
            source = self._sources[path]
            for begin, end, new in sorted(edits, reverse=True):
                source = source[:begin] + new.replace(_PRELUDE, recorder).encode() + source[end:]
            found[path] = source.decode()
        return found


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


_Assertion = tuple[ast.stmt, list[_Condition], bool]
"""(statement, its conditions, whether a test that passes has run it)"""


class _Names:
    """The variables of a function or of a module that are used for nothing but to be compared with."""

    def __init__(self, tree: ast.AST) -> None:
        self.cells: dict[str, list[Cell]] = {}
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

    def bind(self, name: str, cells: Sequence[Cell], stored: int = 1) -> None:
        """One place that stores so many values under a name, these literals among them."""
        self.cells.setdefault(name, []).extend(cells)
        if len(cells) < stored:
            self.mixed.add(name)
        self._explained[name] = self._explained.get(name, 0) + 1

    def blind(self) -> _Blind:
        return {
            name: (cells, name in self.mixed)
            for name, cells in self.cells.items()
            if cells
            and self._explained[name] == self._stores.get(name)
            and self._loads.get(name, set()) <= self.harmless
        }


class _Module:
    """What is edited in one module."""

    def __init__(self, expected: Expectations, recorder: str, path: str, source: bytes, tree: ast.Module) -> None:
        self._expected, self._recorder, self._path, self._source = expected, recorder, path, source
        self._tree = tree
        self._starts = [0]
        for line in source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self._edits: dict[int, tuple[int, int, str]] = {}
        self._tokens: dict[int, str] = {}  # literal → the token in its place
        self._globals = _Names(tree)
        self._tables: dict[str, ast.expr] = {}
        self._loaded: Counter[str] = Counter()

    def edits(self) -> list[tuple[int, int, str]]:
        """(begin, end, new text) in bytes of the source; none where there is nothing to record."""
        for node in self._tree.body:
            inner = node.body if isinstance(node, ast.ClassDef) else []
            for prefix, each in (("", node), *(("self.", statement) for statement in inner)):
                if isinstance(each, ast.Assign) and len(each.targets) == 1 and isinstance(each.targets[0], ast.Name):
                    self._tables[prefix + each.targets[0].id] = each.value
                    if not prefix:
                        self._globals.bind(each.targets[0].id, [(each.value, "")] if _is_literal(each.value) else [])
        for loaded in ast.walk(self._tree):
            if isinstance(loaded, ast.Name | ast.Attribute) and isinstance(loaded.ctx, ast.Load):
                self._loaded[loaded.id if isinstance(loaded, ast.Name) else f"self.{loaded.attr}"] += 1
        scanned = []
        for name, function in _test_functions(self._tree.body, ""):
            names = _Names(function)
            leaves = any(
                isinstance(node, ast.Return | ast.Yield | ast.YieldFrom | ast.Break | ast.Continue)
                or (isinstance(node, ast.Call) and _called(node) in ("skip", "skipTest", "importorskip", "xfail"))
                for node in ast.walk(function)
            )  # before its last line, and still passes
            assertions = list(_assertions(function.body, not leaves))
            self._bind(names, function)
            for condition in (each for _, conditions, _ in assertions for each in conditions):
                self._globals.harmless.add(id(condition.name()))
                names.harmless.add(id(condition.name()))
            for statement, _, _ in assertions:  # messages are not kept
                names.harmless |= {id(node) for message in _messages(statement) for node in ast.walk(message)}
            scanned.append((name, names, assertions))
        for name, names, assertions in scanned:
            self._expected.tests.add((self._path, name))
            blind = {**self._globals.blind(), **names.blind()}
            for assertion in assertions:
                self._assertion((self._path, name), assertion, blind)
        if not self._edits:
            return []
        head = int(ast.get_docstring(self._tree) is not None)  # it stays in front, as do imports from __future__
        first = next(n for n in self._tree.body[head:] if getattr(n, "module", None) != "__future__")
        begin = self._starts[min([first.lineno, *(d.lineno for d in getattr(first, "decorator_list", []))]) - 1]
        return [*self._edits.values(), (begin, begin, _PRELUDE)]

    def _bind(self, names: _Names, function: ast.AST) -> None:
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
            return self._tables[name] if name in self._tables and self._loaded[name] == 1 else node

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

    def _assertion(self, test: Test, assertion: _Assertion, blind: _Blind) -> None:
        statement, conditions, required = assertion
        if isinstance(statement, ast.With | ast.AsyncWith):
            for item in statement.items:
                if _raises(item.context_expr):
                    key, negated = self._truth(test, required, True)
                    block = self._text(item.context_expr)
                    self._edit(item.context_expr, f"{self._recorder}['Raises']({key!r}, {block}, {negated})")
            return
        calls = [self._recorded(test, required, each, blind) for each in conditions]
        self._edit(statement, "; ".join(f"{self._recorder}['record']({call})" for call in calls))

    def _recorded(self, test: Test, required: bool, condition: _Condition, blind: _Blind) -> str:
        left, right, operation = condition.left, condition.right, condition.operation
        tolerance = condition.tolerance
        for here, there, name in ((left, right, operation), (right, left, _MIRRORED.get(operation, ""))):
            if there is None or here is None or not name:
                continue
            if _is_literal(there):
                key = self._expected.site(test, name, required, tolerance=tolerance)
                self._expected.expected[key] = ast.literal_eval(there)
                return f"{key!r}, ({self._text(here)})"
            if isinstance(there, ast.Name) and there is condition.name() and blind.get(there.id):
                cells, mixed = blind[there.id]
                keys = [self._token(cell, shown) for cell, shown in cells]
                key = self._expected.site(test, name, required, tolerance=tolerance, keys=keys, computed=mixed)
                return f"{key!r}, ({self._text(here)}), {there.id}"
        if operation == "==" and right is not None:
            key = self._expected.site(test, operation, required, keys=(), computed=True)
            return f"{key!r}, ({self._text(left)}), ({self._text(right)})"
        key, negated = self._truth(test, required, not condition.negated)
        told = self._text(left) if right is None else f"({self._text(left)}) {operation} ({self._text(right)})"
        return f"{key!r}, {'not ' if negated else 'bool'}({told})"

    def _truth(self, test: Test, required: bool, expected: bool) -> tuple[str, bool]:
        """(the key of a site that records true or false, whether it is to record the opposite)"""
        key, negated = self._expected.site(test, "is", required), random.SystemRandom().random() < 0.5
        self._expected.expected[key] = expected is not negated
        return key, negated

    def _token(self, cell: ast.expr, shown: str) -> str:
        if id(cell) not in self._tokens:
            token = self._tokens[id(cell)] = new_token()
            self._expected.expected[token], self._expected.shown[token] = ast.literal_eval(cell), shown
            self._edit(cell, repr(token))
        return self._tokens[id(cell)]

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
            yield node, conditions, required
        elif isinstance(node, ast.With | ast.AsyncWith):
            if any(_raises(item.context_expr) for item in node.items):
                yield node, [], required
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


def _test_id(value: Any, argument: str, row: int) -> str:
    """How pytest writes a value in a test's name."""
    if isinstance(value, str) and value:
        return value.encode("unicode_escape").decode()
    if isinstance(value, bytes):
        return value.decode("latin-1").encode("unicode_escape").decode()
    return str(value) if value is None or isinstance(value, bool | int | float | complex) else f"{argument}{row}"
