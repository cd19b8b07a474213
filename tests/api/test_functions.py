"""Reward functions of this process → names that a fresh process finds: a module's, a file's, a written text's."""

import functools
import importlib
import linecache
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from textwrap import indent
from types import ModuleType
from typing import Any

import pytest

from nemotron_steps.api import functions
from nemotron_steps.api.functions import function_reference
from nemotron_steps.environments.custom_reward import load
from nemotron_steps.errors import ConfigError
from nemotron_steps.runs.code_digest import Code

TEXTS = ["a1", "22", "b"]


def in_a_cell(source: str, names: dict[str, Any] | None = None) -> dict[str, Any]:
    """Names after a notebook's cell was run: of no module, their source known to linecache alone."""
    filename = f"/tmp/ipykernel_1/{abs(hash(source))}.py"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    space = names if names is not None else {"__name__": "__main__"}
    exec(compile(source, filename, "exec", dont_inherit=True), space)
    return space


def text_of(function: Callable[..., Any], folder: Path) -> str:
    return Path(function_reference(function, folder).rpartition(":")[0]).read_text()


CELL = '''
from __future__ import annotations
import re
import math as m, os.path
from collections import Counter
from math import sqrt as root

DIGITS = re.compile(r"\\d", re.IGNORECASE)
WORTH = {"a": 1.5, "b": (2, None), "c": [float("-inf"), 1e300], (1,): {8, 0}, 2: frozenset({b"x"})}
LIMIT = 2
Unwritten = object()


def len(text):
    return 7.0


def helper(text: NoSuch, depth=0, *, most=3) -> Unwritten:
    # a comment
    if depth < LIMIT:
        return helper(text, depth + 1)
    return root(Counter(text).total()) + m.pi + len(text) + WORTH["b"][0]


other = helper


def score(completions, sign=-1, **columns):
    """What it is."""
    class Judge:
        def of(self, text):
            return [sign * other(text), DIGITS.findall(text), os.path.join("a", text), WORTH, """
two lines"""]

    return [Judge().of(text) for text in completions]
'''


@pytest.mark.parametrize("is_indented", [False, True])
def test_a_cells_function_is_written_with_the_functions_imports_and_constants_that_it_uses(
    is_indented: bool, tmp_path: Path
) -> None:
    head, start, body = CELL.partition("def score")
    if is_indented:
        start, body = f"if True:\n    {start}", indent(body, "    ", lambda line: line[:1] == " ")
    score = in_a_cell(head + start + body)["score"]
    assert load(function_reference(score, tmp_path))(completions=TEXTS) == score(completions=TEXTS)
    assert score(TEXTS)[0][-1] == "\ntwo lines"


def test_the_text_is_the_same_in_every_process_and_another_where_something_changed(tmp_path: Path) -> None:
    def name(source: str) -> str:
        return function_reference(in_a_cell(source)["score"], tmp_path)

    first = name(CELL)
    assert name(CELL.replace("# a comment", "# another, and longer").replace("8, 0", "0, 8")) == first
    changes = [('"a": 1.5', '"a": 1.25'), ("LIMIT = 2", "LIMIT = 3"), ('r"\\d"', 'r"\\d+"'), ("re.IGNORECASE", "0"),
               ("sign=-1", "sign=1"), ("depth + 1", "depth + 2"), ("sqrt as", "log as")]  # fmt: skip
    assert len({first, *(name(CELL.replace(*change)) for change in changes)}) == 8
    assert name(CELL) == first and len(list(tmp_path.iterdir())) == 8


DEF = "def score(completions, **c):\n    return "


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("score = lambda completions, **c: 1", "a lambda has no name"),
        ("def made(by, to):\n    def score(**c):\n        return by + to\n    return score\nscore = made(1, 2)",
         "'score' uses by, to of the function that it is defined in"),
        ("import functools\ndef twice(f):\n    @functools.wraps(f)\n    def g(**c):\n        return 2 * f(**c)\n"
         f"    return g\n@twice\n{DEF}1", "'score' uses f of the function"),
        (f"from functools import cache\n@cache\ndef known(x):\n    return x\n{DEF}known(1)",
         "uses 'known', a functools._lru_cache_wrapper of this process"),
        ("k = 2\ndef score(completions, k=k, **c):\n    return k", "default arguments of 'score' are not constants"),
        (f"{DEF}1\nscore.weight = 2", "'score' is decorated, or has attributes"),
        ("def score(completions, k=1, **c):\n    return k\nscore.__defaults__ = (2,)", "default arguments of 'score'"),
        (f"deep = [{{1: object()}}]\n{DEF}deep", "uses 'deep', a builtins.list of this process"),
        (f"API_KEY = 'x'\n{DEF}API_KEY", "uses 'API_KEY', which may be a secret"),
        (f"{DEF}'sk-proj-4f9aB2cD8eF1gH3jK5mN7pQ9rS0tU2vW4xY6z'", "looks like a secret"),
    ],
)  # fmt: skip
def test_what_the_text_would_not_say_is_refused_by_name(source: str, told: str, tmp_path: Path) -> None:
    score = in_a_cell(source)["score"]
    with pytest.raises(ConfigError) as raised:
        function_reference(score, tmp_path, 2)
    assert told in raised.value.what and raised.value.where == "rewards[2]"
    assert raised.value.hints[0].startswith("rewards=['rewards.py:")
    assert not list(tmp_path.iterdir())


def test_a_function_without_source_is_refused(tmp_path: Path) -> None:
    space: dict[str, Any] = {"__name__": "__main__"}
    exec(f"{DEF}1", space)
    with pytest.raises(ConfigError, match="has no source here"):
        function_reference(space["score"], tmp_path)


class Scorer:
    def __call__(self, completions: list[str], **columns: Any) -> list[float]:
        return [0.0 for _ in completions]


@pytest.mark.parametrize(
    ("given", "found"),
    [(Scorer(), "Scorer"), (Scorer, "type"), (functools.partial(max, 1), "partial"), (3, "int")],
)
def test_what_is_no_function_is_refused(given: Any, found: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a reward is a function") as caught:
        function_reference(given, tmp_path, 1)
    assert (caught.value.where, caught.value.found) == ("rewards[1]", found)


@pytest.fixture
def module_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], ModuleType]:
    """Import a module of a folder that only this process's sys.path leads to."""
    before = set(sys.modules)
    known = sysconfig.get_paths()
    monkeypatch.setattr(functions.sysconfig, "get_paths", lambda: known)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path / "src"))

    def imported(name: str, text: str) -> ModuleType:
        file = tmp_path / "src" / (name.replace(".", "/") + ".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        importlib.invalidate_caches()
        return importlib.import_module(name)

    yield imported
    for name in set(sys.modules) - before:
        if name.startswith("own_"):
            del sys.modules[name]


def test_a_function_of_a_file_goes_by_the_file(module_of: Any, tmp_path: Path) -> None:
    module = module_of("own_scores", f"{DEF}[1.0]\n")
    assert function_reference(module.score, tmp_path / "given") == f"{module.__file__}:score"
    assert not (tmp_path / "given").exists()


@pytest.mark.parametrize("name", ["own_package.scores", "own_package.__init__"])
def test_a_function_of_a_package_goes_by_the_module_where_others_find_it_and_is_imported_from_there_elsewhere(
    name: str, module_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = module_of(name, f"{DEF}[1.0]\n")
    module = sys.modules[module.__name__.removesuffix(".__init__")]
    source = str(tmp_path / "src")
    lines = text_of(module.score, tmp_path).splitlines()
    assert lines[1:] == ["import sys", f"sys.path.append({source!r})", f"from {module.__name__} import score"]
    assert load(function_reference(module.score, tmp_path)) is module.score
    monkeypatch.setenv("PYTHONPATH", f"/elsewhere:{source}")
    assert function_reference(module.score, tmp_path) == f"{module.__name__}:score"
    monkeypatch.delenv("PYTHONPATH")
    monkeypatch.chdir(source)
    assert function_reference(module.score, tmp_path) == f"{module.__name__}:score"


def test_a_module_of_ones_own_that_is_used_counts_with_its_content(
    module_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module_of("own_helpers", "def norm(text):\n    return text.strip()\n")
    score = in_a_cell(f"from own_helpers import norm\n{DEF}[*map(norm, completions)]")["score"]
    file = Path(function_reference(score, tmp_path).rpartition(":")[0])
    # As in another process, which finds the module by the text alone.
    monkeypatch.delitem(sys.modules, "own_helpers")
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != str(tmp_path / "src")])
    code = Code()
    code.add_file(file)
    assert {f"file {file.name}", "file own_helpers.py"} == set(code.files)
