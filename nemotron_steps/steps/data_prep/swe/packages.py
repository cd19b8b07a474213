"""Faults, one small change of one line of Python each, and packages that they are put into: of a folder, tests apart,
since an agent never gets them; or made here, for models that are too small for real ones.
"""

import ast
import hashlib
import itertools
import operator
import random
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from nemotron_steps.config.schema.data_prep import MadeUpPackages, MutationKind
from nemotron_steps.environments.swe.working_copy import HIDDEN_FOLDERS, STEERING, is_test
from nemotron_steps.errors import DataError
from nemotron_steps.steps.data_prep.blends.splits import Split, split_at

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


@dataclass(frozen=True)
class Package:
    """A package with its tests."""

    name: str
    files: Mapping[str, str]
    test_files: Mapping[str, str]
    test_command: str

    @cached_property
    def digest(self) -> str:
        """The same for the same texts."""
        parts = [
            self.test_command,
            *(f"{p}\0{t}" for files in (self.files, self.test_files) for p, t in sorted(files.items())),
        ]
        return hashlib.sha256("\0\0".join(parts).encode()).hexdigest()

    @property
    def modules(self) -> list[str]:
        """Files that faults may be put into."""
        return sorted(path for path in self.files if path.endswith(".py") and path.rsplit("/", 1)[-1] not in STEERING)


def packages_in(path: str, test_command: str, max_bytes: int) -> tuple[list[Package], dict[str, str]]:
    """The packages of a folder: the folder itself if it holds Python files and tests, else each of its folders."""
    root, folders = Path(path), []
    if any(root.glob("test*/*.py")) or any(root.glob("test_*.py")):
        folders = [root]
    elif root.is_dir():
        folders = sorted(folder for folder in root.iterdir() if folder.is_dir())
    packages, refused = [], {}
    for folder in folders:
        package = _read(folder, test_command)
        problem = _problem(package, max_bytes)
        if problem is None:
            packages.append(package)
        else:
            refused[folder.name] = problem
    if not packages:
        raise DataError(
            "no package with tests at the given path",
            where="packages.path",
            expected="a folder with Python files and tests (tests/ or test_*.py), or a folder of such folders",
            found="; ".join(f"{name}: {why}" for name, why in list(refused.items())[:5]) or path,
            hints=("packages.path=FOLDER_OF_A_PACKAGE",),
        )
    return packages, refused


def _read(folder: Path, test_command: str) -> Package:
    files: dict[str, str] = {}
    tests: dict[str, str] = {}
    for file in sorted(folder.rglob("*")):
        relative = file.relative_to(folder)
        if file.is_symlink() or not file.is_file() or not HIDDEN_FOLDERS.isdisjoint(relative.parts):
            continue
        try:
            text = file.read_bytes().decode()
        except UnicodeDecodeError:
            continue
        (tests if is_test(str(relative)) else files)[str(relative)] = text
    return Package(folder.resolve().name, files, tests, test_command)


def _problem(package: Package, max_bytes: int) -> str | None:
    size = sum(len(text.encode()) for files in (package.files, package.test_files) for text in files.values())
    if not package.modules or not package.test_files:
        return "no Python files" if not package.modules else "no tests"
    if size > max_bytes:
        return f"{size} bytes, over packages.max_bytes={max_bytes}"
    # The sandbox shows what is installed: the fault could be looked up there.
    tops = {path.removeprefix("src/").split("/")[0].removesuffix(".py") for path in package.modules} - {"setup"}
    folders = [Path(folder) for folder in sys.path if Path(folder).name in ("site-packages", "dist-packages")]
    places = (folder / name for folder in folders for top in sorted(tops) for name in (top, f"{top}.py"))
    installed = next((place for place in places if place.exists()), None)
    if installed is not None:
        return f"it is installed at {installed}, which an agent can read: mine in an environment without it"
    return None


MADE_UP_COMMAND = "python -S -m unittest -v {tests}"

FUNCTIONS: dict[str, tuple[str, Callable[[Any, Any], Any]]] = {
    "plus": ("+", operator.add),
    "minus": ("-", operator.sub),
    "times": ("*", operator.mul),
    "over": ("//", operator.floordiv),
    "rest": ("%", operator.mod),
    "both": ("&", operator.and_),
    "either": ("|", operator.or_),
    "differ": ("^", operator.xor),
    "less": ("<", operator.lt),
    "upto": ("<=", operator.le),
    "more": (">", operator.gt),
    "least": (">=", operator.ge),
    "same": ("==", operator.eq),
    "unlike": ("!=", operator.ne),
}
CASES = ((7, 2), (2, 7), (6, 6), (5, 3), (1, 4))
"""Arguments that made-up tests try. Two operators that agree on all of them make a fault that no test can notice."""
_LETTERS = "abcdefghijkmnpqrstuvwxyz"


def made_up_packages(seed: int, functions: int) -> Iterator[Package]:
    """Different modules of one-line functions, in an order drawn from the seed, until they are used up."""
    rng = random.Random(f"{seed}:packages")
    pairs = list(itertools.permutations(_LETTERS, 2))
    names = list(FUNCTIONS)
    order = [(name, pair) for name in names for pair in pairs]
    rng.shuffle(order)
    for first, pair in order:
        others = rng.sample([name for name in names if name != first], functions - 1)
        yield _made_up([(first, pair), *((name, rng.choice(pairs)) for name in others)])


def _made_up(functions: Sequence[tuple[str, tuple[str, str]]]) -> Package:
    module = functions[0][0]
    source = "\n\n".join(
        f"def {name}({a}, {b}):\n    return {a} {FUNCTIONS[name][0]} {b}\n" for name, (a, b) in functions
    )
    names = ", ".join(name for name, _ in functions)
    lines = ["import unittest", "", f"from {module} import {names}", "", "", "class Tests(unittest.TestCase):"]
    for name, _ in functions:
        results = ", ".join(f"(({x}, {y}), {FUNCTIONS[name][1](x, y)})" for x, y in CASES)
        lines += [
            f"    def test_{name}(self):",
            f"        for given, wanted in [{results}]:",
            f"            self.assertEqual({name}(*given), wanted)",
            "",
        ]
    return Package(module, {f"{module}.py": source}, {f"test_{module}.py": "\n".join(lines)}, MADE_UP_COMMAND)


def made_up_tasks(source: MadeUpPackages, seed: str) -> Iterator[tuple[Split, Package, Mutation, list[Mutation]]]:
    """(split, package, its fault, all its faults) of packages made here, none proven."""
    for package in made_up_packages(source.seed, source.functions):
        (path,) = package.modules
        faults = mutations_of(path, package.files[path], source.mutations)
        if faults:
            fault = random.Random(f"{seed}:{package.digest}").choice(faults)
            # The split is the package's, whatever is broken in it.
            place = int(package.digest[:16], 16) / 2**64
            yield split_at(place, source.heldout_fraction, source.validation_fraction), package, fault, faults


def failing_test(package: Package, mutation: Mutation) -> str:
    """The test of the function of a made-up package that a fault is in."""
    (test_file,) = package.test_files
    above = package.files[mutation.path].split("\n")[: mutation.line]
    function = next(line for line in reversed(above) if line.startswith("def ")).split("(")[0].removeprefix("def ")
    return f"{test_file.removesuffix('.py')}.Tests.test_{function}"
