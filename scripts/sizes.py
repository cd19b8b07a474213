"""How large the house is, and how finely it is cut: `python scripts/sizes.py [--json]`, from the root of a checkout.

Package lines are those of every text file that the wheel ships from nemotron_steps/; manifests/ and configs/ are data
and are not counted. Lines of tests are those of the Python files under tests/. The other figures are there so that
lines are not won by denser ones.
"""

import ast
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "nemotron_steps"
LONG = 60
Function = ast.FunctionDef | ast.AsyncFunctionDef
_BLOCKS = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try, ast.Match)


@dataclass(frozen=True)
class Sizes:
    """The figures, in the order in which they are printed."""

    package_lines: int
    package_files: int
    test_lines: int
    test_files: int
    benchmark_lines: int
    largest_folders: dict[str, int]
    """Files, without __init__.py, of the folders that have more than 15."""
    functions: int
    mean_function_lines: float
    long_functions: float
    """Share of functions longer than 60 lines, in percent."""
    mean_line_characters: float
    """Of lines with code on them."""
    mean_nesting: float
    """Deepest block of a function, mean over functions."""
    mean_parameters: float
    private_named_once: float
    """Share of private functions that are named once outside their own definition, in percent."""


def main() -> None:
    """Print the figures."""
    sizes = measure()
    if "--json" in sys.argv[1:]:
        print(json.dumps(vars(sizes), indent=1))
        return
    for name, value in vars(sizes).items():
        shown = f"{value:,.2f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else value
        print(f"{name.replace('_', ' '):24} {shown}")


def measure() -> Sizes:
    """Measure the checkout this script is in."""
    package = list(_text_files(PACKAGE))
    tests = [path for path in _text_files(ROOT / "tests") if path.suffix == ".py"]
    folders = Counter(str(path.parent.relative_to(ROOT)) for path in package if path.name != "__init__.py")
    sources = [path.read_text("utf-8") for path in package if path.suffix == ".py"]
    trees = [ast.parse(source) for source in sources]
    functions = [node for tree in trees for node in ast.walk(tree) if isinstance(node, Function)]
    lengths = [(node.end_lineno or node.lineno) - node.lineno + 1 for node in functions]
    code = [line.rstrip() for source in sources for line in source.splitlines() if line.strip()]
    return Sizes(
        package_lines=sum(map(_lines, package)),
        package_files=len(package),
        test_lines=sum(map(_lines, tests)),
        test_files=len(tests),
        benchmark_lines=sum(map(_lines, _text_files(ROOT / "benchmarks"))),
        largest_folders={name: files for name, files in folders.most_common() if files > 15},
        functions=len(functions),
        mean_function_lines=_mean(lengths),
        long_functions=100 * _mean([length > LONG for length in lengths]),
        mean_line_characters=_mean([len(line) for line in code]),
        mean_nesting=_mean([_depth(node) for node in functions]),
        mean_parameters=_mean([_parameters(node) for node in functions]),
        private_named_once=100
        * _mean([once for source, tree in zip(sources, trees, strict=False) for once in _named_once(source, tree)]),
    )


def _named_once(source: str, tree: ast.Module) -> Iterator[bool]:
    """For each private function of a file: whether its name stands once in the file beside its definition."""
    named = Counter(re.findall(r"\b_[a-z]\w*", source))
    for node in ast.walk(tree):
        if isinstance(node, Function) and re.match(r"_[a-z]", node.name):
            yield named[node.name] == 2


def _text_files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts and b"\0" not in path.read_bytes():
            yield path


def _lines(path: Path) -> int:
    return len(path.read_text("utf-8").splitlines())


def _depth(node: ast.AST) -> int:
    """Blocks inside each other in a function, an `elif` at the depth of its `if`."""
    deepest = 0
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(child, (*Function.__args__, ast.ClassDef, ast.Lambda)):
                continue
            is_elif = name == "orelse" and isinstance(node, ast.If) and isinstance(child, ast.If) and len(value) == 1
            deepest = max(deepest, _depth(child) + (isinstance(child, _BLOCKS) and not is_elif))
    return deepest


def _parameters(node: Function) -> int:
    arguments = node.args
    return len(arguments.posonlyargs) + len(arguments.args) + len(arguments.kwonlyargs)


def _mean(values: list[int] | list[bool]) -> float:
    return sum(values) / max(len(values), 1)


if __name__ == "__main__":
    main()
