"""Packages that faults are put into: of a folder, files and tests apart, since an agent never gets the tests; or made
here, for models that are too small for real ones: modules of one-line functions.
"""

import hashlib
import itertools
import operator
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from nemotron_steps.config.schema.data_prep import MadeUpPackages
from nemotron_steps.environments.swe.working_copy import HIDDEN_FOLDERS, STEERING, is_test
from nemotron_steps.errors import DataError
from nemotron_steps.steps.data_prep.blends.splits import Split, split_at
from nemotron_steps.steps.data_prep.swe.mutations import Mutation, mutations_of


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
