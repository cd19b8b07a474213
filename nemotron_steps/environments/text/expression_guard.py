"""Refuse answers that a library scorer would execute as code, or that would take for ever to evaluate.

Some scorers of reasoning-gym pass the answer to `eval` or to sympy's `parse_expr`, which evaluates Python. An answer
is written by a model, so before such a scorer sees it, its syntax tree must hold nothing but data (literals) or
arithmetic with bounded powers. Not an evaluator: nothing here computes a value.
"""

import ast
import re
import warnings

MAX_LENGTH = 20_000
MAX_EXPRESSION_LENGTH = 2_000
MAX_INTEGER = 10**15
MAX_EXPONENT = 100
MAX_NODES = 2_000

FUNCTIONS = frozenset(
    {"sin", "cos", "tan", "sec", "csc", "cot", "asin", "acos", "atan", "sinh", "cosh", "tanh"}
    | {"asinh", "acosh", "atanh", "exp", "log", "ln", "sqrt", "Abs"}
)
CONSTANTS = frozenset({"pi", "E"})

_INERT = (
    *(ast.Expression, ast.Constant, ast.Name, ast.Load),
    *(ast.List, ast.Tuple, ast.Set, ast.Dict),
    *(ast.UnaryOp, ast.USub, ast.UAdd),
)
_NON_FINITE = re.compile(r"nan|inf(?:inity)?", re.IGNORECASE)
_NOT_OF_NUMBERS = re.compile(r"[^\s\d.,ij+*/()\[\]-]", re.IGNORECASE)
_HUGE_EXPONENT = re.compile(r"\d[eE][+-]?\d{4,}")


def is_plain_number_text(text: str) -> bool:
    """False for a text holding a number like 1e999999, which exact arithmetic would try to write out."""
    return _HUGE_EXPONENT.search(text) is None


def is_non_finite(text: str) -> bool:
    """Whether a text is a number, or several, with NaN or an infinity in it: no distance to one means anything."""
    rest = _NON_FINITE.sub("", text)
    return rest != text and not _NOT_OF_NUMBERS.search(rest)


def is_inert_literal(text: str) -> bool:
    """Whether `eval(text)` can only fail or return plain data: not Python at all, or literals and bare names."""
    if len(text) > MAX_LENGTH:
        return False
    tree = _parse(text)
    if tree is None:
        return True
    return all(isinstance(node, _INERT) for node in ast.walk(tree))


def is_bounded_arithmetic(text: str) -> bool:
    """Whether `text` is an arithmetic expression over numbers, single-letter symbols and elementary functions, small
    enough to evaluate at once. Texts that are not Python at all are refused too (sympy's parser is more lenient)."""
    if len(text) > MAX_EXPRESSION_LENGTH or not is_plain_number_text(text):
        return False
    tree = _parse(text)
    if tree is None or sum(1 for _ in ast.walk(tree)) > MAX_NODES:
        return False
    return _is_arithmetic(tree.body, power_depth=0)


def _parse(text: str) -> ast.Expression | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            return ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return None


def _is_arithmetic(node: ast.expr, power_depth: int) -> bool:
    match node:
        case ast.Constant(value=bool()):
            return False
        case ast.Constant(value=int(value) | float(value)):
            return abs(value) <= MAX_INTEGER
        case ast.Name(id=name):
            return len(name) == 1 or name in CONSTANTS
        case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=operand):
            return _is_arithmetic(operand, power_depth)
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() | ast.Mult() | ast.Div(), right=right):
            return _is_arithmetic(left, power_depth) and _is_arithmetic(right, power_depth)
        case ast.BinOp(left=base, op=ast.Pow(), right=exponent):
            return power_depth < 2 and _is_arithmetic(base, power_depth + 1) and _is_exponent(exponent, power_depth + 1)
        case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if name in FUNCTIONS:
            return _is_arithmetic(argument, power_depth)
        case _:
            return False


def _is_exponent(node: ast.expr, power_depth: int) -> bool:
    """A number up to MAX_EXPONENT, or symbolic: something no evaluation would expand into digits."""
    match node:
        case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=operand):
            return _is_exponent(operand, power_depth)
        case ast.Constant(value=int(value)) if not isinstance(value, bool):
            return abs(value) <= MAX_EXPONENT
        case ast.Constant(value=float(value)):
            return abs(value) <= MAX_EXPONENT
        case ast.BinOp(left=ast.Constant(value=int(left)), op=ast.Div(), right=ast.Constant(value=int(right))):
            return abs(left) <= MAX_EXPONENT and 0 < abs(right) <= MAX_EXPONENT
        case _:
            symbolic = any(isinstance(child, ast.Name) and child.id not in CONSTANTS for child in ast.walk(node))
            powers = any(isinstance(child, ast.Pow) for child in ast.walk(node))
            return symbolic and not powers and _is_arithmetic(node, power_depth)
