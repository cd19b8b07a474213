"""Faults: one small change of one line of Python, of the kinds that people make: another operator or comparison, `and`
for `or`, a constant off by one, a condition negated, two arguments swapped, nothing returned."""

import ast
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from nemotron_steps.config.schema.data_prep import MutationKind

_OPERATORS: dict[type[ast.operator], tuple[str, tuple[str, ...]]] = {
    ast.Add: ("+", ("-", "*")),
    ast.Sub: ("-", ("+", "*")),
    ast.Mult: ("*", ("+", "//")),
    ast.Div: ("/", ("*", "//")),
    ast.FloorDiv: ("//", ("*", "%")),
    ast.Mod: ("%", ("//", "+")),
    ast.Pow: ("**", ("*",)),
    ast.BitAnd: ("&", ("|", "^")),
    ast.BitOr: ("|", ("&", "^")),
    ast.BitXor: ("^", ("&", "|")),
    ast.LShift: ("<<", (">>",)),
    ast.RShift: (">>", ("<<",)),
}
_COMPARISONS: dict[type[ast.cmpop], tuple[str, tuple[str, ...]]] = {
    ast.Lt: ("<", ("<=", ">")),
    ast.LtE: ("<=", ("<", ">=")),
    ast.Gt: (">", (">=", "<")),
    ast.GtE: (">=", (">", "<=")),
    ast.Eq: ("==", ("!=", ">=")),
    ast.NotEq: ("!=", ("==", "<")),
    ast.In: ("in", ("not in",)),
    ast.NotIn: ("not in", ("in",)),
    ast.Is: ("is", ("is not",)),
    ast.IsNot: ("is not", ("is",)),
}


@dataclass(frozen=True)
class Mutation:
    """One fault of a line: the line `correct` and `broken`, and the `source` of the whole file with it."""

    kind: MutationKind
    path: str
    line: int
    correct: str
    broken: str
    source: str


def mutations_of(path: str, source: str, kinds: Collection[MutationKind]) -> list[Mutation]:
    """Every fault of the kinds, in the order of the file. No faults for a file that this interpreter cannot parse."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return []
    lines = source.split("\n")
    found: dict[str, Mutation] = {}
    for node in ast.walk(tree):
        for kind, line, begin, end, text in _changes(node, lines):
            if kind not in kinds:
                continue
            correct = lines[line - 1]
            broken = correct[:begin] + text + correct[end:]
            changed = "\n".join([*lines[: line - 1], broken, *lines[line:]])
            if broken != correct and _parses(changed):
                found.setdefault(changed, Mutation(kind, path, line, correct, broken, changed))
    return sorted(found.values(), key=lambda m: (m.line, m.kind, m.broken))


_Change = tuple[MutationKind, int, int, int, str]
"""(kind, line, first column, end column, text to stand there)."""


def _changes(node: ast.AST, lines: list[str]) -> Iterator[_Change]:
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        yield from _between("operator", node.left, node.right, _OPERATORS[type(node.op)], lines)
    elif isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        for left, right, op in zip(sides, node.comparators, node.ops, strict=False):
            yield from _between("comparison", left, right, _COMPARISONS[type(op)], lines)
    elif isinstance(node, ast.BoolOp):
        words = ("and", ("or",)) if isinstance(node.op, ast.And) else ("or", ("and",))
        for left, right in zip(node.values, node.values[1:], strict=False):
            yield from _between("boolean", left, right, words, lines)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield from _replace("boolean", node, _text(node.operand, lines), lines)
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        yield from _replace("constant", node, str(node.value + 1), lines)
    elif isinstance(node, ast.Constant) and type(node.value) is bool:
        yield from _replace("constant", node, str(not node.value), lines)
    elif isinstance(node, ast.If | ast.While | ast.IfExp):
        test = _text(node.test, lines)
        yield from _replace("condition", node.test, test and f"not ({test})", lines)
    elif isinstance(node, ast.Call) and len(node.args) == 2 and not any(isinstance(a, ast.Starred) for a in node.args):
        first, second = (_text(argument, lines) for argument in node.args)
        one_line = node.args[0].lineno == node.args[1].end_lineno
        if first and second and one_line:
            begin, end = _column(node.args[0], lines), _column(node.args[1], lines, end=True)
            middle = lines[node.args[0].lineno - 1][
                _column(node.args[0], lines, end=True) : _column(node.args[1], lines)
            ]
            yield "arguments", node.args[0].lineno, begin, end, f"{second}{middle}{first}"
    elif isinstance(node, ast.Return) and node.value is not None:
        yield from _replace("return", node.value, "None", lines)


def _between(
    kind: MutationKind, left: ast.expr, right: ast.expr, words: tuple[str, tuple[str, ...]], lines: list[str]
) -> Iterator[_Change]:
    """Another word in the place of the one between two operands of one line."""
    if left.end_lineno != right.lineno:
        return
    word, others = words
    begin, end = _column(left, lines, end=True), _column(right, lines)
    place = lines[right.lineno - 1].find(word, begin, end)
    if place >= 0:
        for other in others:
            yield kind, right.lineno, place, place + len(word), other


def _replace(kind: MutationKind, node: ast.expr, text: str | None, lines: list[str]) -> Iterator[_Change]:
    if text and node.lineno == node.end_lineno:
        yield kind, node.lineno, _column(node, lines), _column(node, lines, end=True), text


def _text(node: ast.expr, lines: list[str]) -> str | None:
    if node.lineno != node.end_lineno:
        return None
    return lines[node.lineno - 1][_column(node, lines) : _column(node, lines, end=True)]


def _column(node: ast.expr, lines: list[str], *, end: bool = False) -> int:
    line, offset = (node.end_lineno, node.end_col_offset) if end else (node.lineno, node.col_offset)
    assert line is not None and offset is not None, "the parser sets them"
    return len(lines[line - 1].encode()[:offset].decode())


def _parses(source: str) -> bool:
    try:
        ast.parse(source)
    except (SyntaxError, ValueError):
        return False
    return True
