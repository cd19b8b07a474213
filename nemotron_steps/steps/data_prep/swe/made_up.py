"""Packages made here for models that are too small for real ones: modules of one-line functions, and their faults."""

from __future__ import annotations

import itertools
import operator
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from nemotron_steps.config.schema.data_prep import MadeUpPackages
from nemotron_steps.steps.data_prep.split_files import Split
from nemotron_steps.steps.data_prep.swe.mutations import Mutation, mutations_of
from nemotron_steps.steps.data_prep.swe.packages import Package

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
"""Name of a made-up function → its operator, and what that does."""
CASES = ((7, 2), (2, 7), (6, 6), (5, 3), (1, 4))
"""Arguments that made-up tests try. Two operators that agree on all of them are no fault that a test can notice."""
_LETTERS = "abcdefghijkmnpqrstuvwxyz"


def made_up_packages(seed: int, functions: int) -> Iterator[Package]:
    """Different modules of one-line functions, in an order drawn from the seed, until there are no more."""
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
            yield split_of(package, source), package, fault, faults


def split_of(package: Package, source: MadeUpPackages) -> Split:
    """The split that a made-up package is in, whatever is broken in it."""
    place = int(package.digest[:16], 16) / 2**64
    if place < source.heldout_fraction:
        return "heldout"
    return "validation" if place < source.heldout_fraction + source.validation_fraction else "train"


def failing_test(package: Package, mutation: Mutation) -> str:
    """The test of the function of a made-up package that a fault is in."""
    (test_file,) = package.test_files
    above = package.files[mutation.path].split("\n")[: mutation.line]
    function = next(line for line in reversed(above) if line.startswith("def ")).split("(")[0].removeprefix("def ")
    return f"{test_file.removesuffix('.py')}.Tests.test_{function}"
