"""A list of planted bugs, and the test that catches each.

    python -m tests.guards.kill_list             # plants each bug and runs its test: all must be caught
    python -m tests.guards.kill_list --only engine/losses   # those of one room
    python -m tests.guards.kill_list --grow 20   # plants 20 more at random and adds those that a test catches

A bug is a few lines of the package and what stands there instead, so it is found wherever the lines are moved to. Lines
that are gone are told: plant another in their room. The list never shrinks; tests may, as long as something else
catches what they caught.
"""

import argparse
import ast
import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).parents[2]
LIST = Path(__file__).with_name("kill_list.jsonl")
PACKAGE = "nemotron_steps"
SECONDS = 240
QUICK = "not vllm and not slurm and not cuda and not chain and not browser and not mkdocs and not slow"


@dataclass(frozen=True)
class Bug:
    """Lines of a file of the package, what stands there instead, and the test that fails then."""

    kind: str
    file: str
    """Where it was planted; the lines decide."""
    old: str
    new: str
    caught_by: str = ""


def main() -> int:
    """Run the list, or grow it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="ROOM", help="bugs of files under this folder of the package")
    parser.add_argument("--grow", type=int, default=0, metavar="N", help="plant N more at random")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-j", "--jobs", type=int, default=2)
    arguments = parser.parse_args()
    known = [Bug(**json.loads(line)) for line in LIST.read_text("utf-8").splitlines()] if LIST.exists() else []
    checkouts: SimpleQueue[Path] = SimpleQueue()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(arguments.jobs) as pool:
        for number in range(arguments.jobs):
            checkouts.put(_copy(Path(folder) / str(number)))

        def in_a_copy(work: Callable[[Path, Bug], Bug | None]) -> Callable[[Bug], Bug | None]:
            def go(bug: Bug) -> Bug | None:
                checkout = checkouts.get()
                try:
                    return work(checkout, bug)
                finally:
                    checkouts.put(checkout)

            return go

        if arguments.grow:
            return _grow(known, arguments, lambda bugs: pool.map(in_a_copy(_catch), bugs))
        chosen = [bug for bug in known if bug.file.startswith(f"{PACKAGE}/{arguments.only}")]
        missed = [
            bug
            for bug, caught in zip(chosen, pool.map(in_a_copy(_still_caught), chosen), strict=False)
            if caught is None
        ]
    for bug in missed:
        print(f"NOT CAUGHT  {bug.file}  {bug.caught_by}\n  - {bug.old.strip()}\n  + {bug.new.strip()}")
    print(f"{len(chosen) - len(missed)} of {len(chosen)} planted bugs are caught")
    return int(bool(missed))


def _grow(known: list[Bug], arguments: argparse.Namespace, catch: Callable[[list[Bug]], Iterator[Bug | None]]) -> int:
    fresh = _random_bugs(arguments.grow, random.Random(arguments.seed), arguments.only, {bug.old for bug in known})
    caught = 0
    for bug, found in zip(fresh, catch(fresh), strict=False):
        if found is None:
            print(f"survives  {bug.kind}  {bug.file}\n  - {bug.old.strip()}\n  + {bug.new.strip()}", flush=True)
            continue
        caught += 1
        with LIST.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(found), ensure_ascii=False) + "\n")
    print(f"{caught} of {len(fresh)} fresh bugs are caught by the tests of their rooms")
    return 0


def _copy(target: Path) -> Path:
    ignored = shutil.ignore_patterns(".venv", ".git", "__pycache__", ".steps", "build", ".*_cache")
    shutil.copytree(ROOT, target, ignore=ignored, symlinks=True)
    return target


def _still_caught(checkout: Path, bug: Bug) -> Bug | None:
    return bug if _run(checkout, bug, [bug.caught_by]) else None


def _catch(checkout: Path, bug: Bug) -> Bug | None:
    """The bug with the first test of its room that fails; None where none does."""
    failed = _run(checkout, bug, _tests_of(checkout, bug.file))
    return Bug(bug.kind, bug.file, bug.old, bug.new, failed) if failed else None


def _run(checkout: Path, bug: Bug, tests: list[str]) -> str | None:
    """The first test that fails with the bug in place, "" included where the tests do not even start."""
    place = _find(checkout, bug)
    if place is None or not tests:
        return None
    path, source = place
    path.write_text(source.replace(bug.old, bug.new), "utf-8")
    environment = {**os.environ, "PYTHONPATH": str(checkout), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "-m", QUICK, "-rfE", *tests]
    process = subprocess.Popen(
        command, cwd=checkout, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        output = process.communicate(timeout=SECONDS)[0].decode(errors="replace")
    except subprocess.TimeoutExpired:
        output = ""
    finally:
        _end(process)
        path.write_text(source, "utf-8")
    found = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", output, re.MULTILINE)
    return found[1] if found else None


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _find(checkout: Path, bug: Bug) -> tuple[Path, str] | None:
    """The one file that has the bug's old lines, and its text."""
    first = checkout / bug.file
    for path in [first, *sorted((checkout / PACKAGE).rglob(f"*{first.suffix}"))]:
        if path.exists() and (source := path.read_text("utf-8")).count(bug.old) == 1:
            return path, source
    return None


def _tests_of(checkout: Path, file: str) -> list[str]:
    """Files of tests that import a module, those with its name or in its room first; at most eight."""
    module = file.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
    package, _, name = module.rpartition(".")
    imports = re.compile(
        rf"^\s*(?:from {re.escape(module)} import|import {re.escape(module)}\b"
        rf"|from {re.escape(package)} import [^#\n]*\b{name}\b)",
        re.MULTILINE,
    )
    room = Path("tests", *Path(file).parts[1:-1])

    def rank(path: Path) -> tuple[bool, bool, int]:
        return name not in path.name, not path.is_relative_to(checkout / room), path.stat().st_size

    importing = [path for path in (checkout / "tests").rglob("test_*.py") if imports.search(path.read_text("utf-8"))]
    if not importing:
        importing = list((checkout / room).glob("test_*.py"))
    return [str(path.relative_to(checkout)) for path in sorted(importing, key=rank)[:8]]


def _random_bugs(count: int, dice: random.Random, only: str, known: set[str]) -> list[Bug]:
    """Bugs at random lines, no two in one function."""
    files = sorted((ROOT / PACKAGE / only).rglob("*.py"))
    weights = [path.stat().st_size for path in files]
    package = "\0".join(path.read_text("utf-8") for path in sorted((ROOT / PACKAGE).rglob("*.py")))
    bugs: list[Bug] = []
    for _ in range(100 * count):
        if len(bugs) == count:
            break
        path = dice.choices(files, weights)[0]
        source = path.read_text("utf-8")
        edits = list(_edits(source))
        if not edits:
            continue
        wanted = dice.choice(sorted({kind for kind, *_ in edits}))
        kind, start, end, text = dice.choice([edit for edit in edits if edit[0] == wanted])
        first = source.rfind("\n", 0, start) + 1
        last = source.find("\n", end) + 1
        while package.count(source[first:last]) > 1 and first:
            first = source.rfind("\n", 0, first - 1) + 1
        bug = Bug(kind, str(path.relative_to(ROOT)), source[first:last], source[first:start] + text + source[end:last])
        if bug.old not in known and all(bug.old != other.old for other in bugs):
            bugs.append(bug)
    return bugs


def _edits(source: str) -> Iterator[tuple[str, int, int, str]]:
    """(kind, start, end, text): every way to plant a bug in a source by replacing one piece of it."""
    lines = [0]
    for line in source.splitlines(keepends=True):
        lines.append(lines[-1] + len(line))

    def at(line: int, column: int) -> int:
        text = source[lines[line - 1] : lines[line]]
        return lines[line - 1] + len(text.encode()[:column].decode())

    def span(node: ast.AST) -> tuple[int, int]:
        return at(node.lineno, node.col_offset), at(node.end_lineno, node.end_col_offset)

    def text(node: ast.AST) -> str:
        return source[slice(*span(node))]

    swaps = {
        ast.Lt: ("wrong bound", "<", "<="),
        ast.LtE: ("wrong bound", "<=", "<"),
        ast.Gt: ("wrong bound", ">", ">="),
        ast.GtE: ("wrong bound", ">=", ">"),
        ast.Eq: ("negated", "==", "!="),
        ast.NotEq: ("negated", "!=", "=="),
        ast.In: ("negated", "in", "not in"),
        ast.NotIn: ("negated", "not in", "in"),
        ast.Is: ("negated", "is", "is not"),
        ast.IsNot: ("negated", "is not", "is"),
        ast.Add: ("wrong sign", "+", "-"),
        ast.Sub: ("wrong sign", "-", "+"),
        ast.Mult: ("wrong sign", "*", "/"),
        ast.And: ("wrong connective", "and", "or"),
        ast.Or: ("wrong connective", "or", "and"),
    }

    def between(kind: type, left: ast.AST, right: ast.AST) -> Iterator[tuple[str, int, int, str]]:
        if kind in swaps:
            name, old, new = swaps[kind]
            start, end = span(left)[1], span(right)[0]
            found = re.search(rf"(?<!\S){re.escape(old)}(?!\S)", source[start:end])
            if found:
                yield name, start + found.start(), start + found.end(), new

    texts = (ast.JoinedStr, ast.List, ast.Tuple)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            yield from between(type(node.ops[0]), node.left, node.comparators[0])
        elif isinstance(node, ast.BinOp) and not any(isinstance(each, texts) for each in ast.walk(node)):
            yield from between(type(node.op), node.left, node.right)
        elif isinstance(node, ast.BoolOp):
            yield from between(type(node.op), node.values[0], node.values[1])
        elif isinstance(node, ast.If) and isinstance(node.body[0], (ast.Raise, ast.Return, ast.Continue)):
            yield "dropped check", *span(node.test), "False"
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub)):
            yield "wrong sign", *span(node), text(node.operand)
        elif isinstance(node, ast.Await):
            yield "missing await", *span(node), text(node.value)
        elif isinstance(node, ast.Call) and len(node.args) > 1 and all(isinstance(a, ast.Name) for a in node.args[:2]):
            first, second = node.args[:2]
            yield "swapped argument", span(first)[0], span(second)[1], f"{text(second)}, {text(first)}"
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.AnnAssign)):
            defaults = (
                [node.value] if isinstance(node, ast.AnnAssign) else [*node.args.defaults, *node.args.kw_defaults]
            )
            for default in defaults:
                if isinstance(default, ast.Constant) and isinstance(default.value, (bool, int, float)):
                    value = default.value
                    yield "wrong default", *span(default), repr(not value if isinstance(value, bool) else value + 1)
        elif isinstance(node, (ast.Subscript, ast.Slice)):
            parts = [node.slice] if isinstance(node, ast.Subscript) else [node.lower, node.upper]
            for part in parts:
                if isinstance(part, ast.Constant) and isinstance(part.value, int):
                    yield "off by one", *span(part), str(part.value + 1)


if __name__ == "__main__":
    sys.exit(main())
