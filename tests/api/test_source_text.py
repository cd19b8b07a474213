"""A function of this process as the text of a module: what it uses comes along, what has no text is refused by name."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from nemotron_steps.api.functions import function_reference
from nemotron_steps.api.source_text import written_down
from nemotron_steps.environments.own.reward_function import load
from nemotron_steps.errors import ConfigError
from nemotron_steps.runs.code_digest import Code

TEXTS = ["a1", "22", "b"]


def in_a_cell(source: str, names: dict[str, Any] | None = None, cell: str = "cell") -> dict[str, Any]:
    """Names after a notebook's cell was run: of no module, their source known to linecache alone."""
    import linecache

    filename = f"/tmp/ipykernel_1/{abs(hash(source))}-{cell}.py"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    space = names if names is not None else {"__name__": "__main__"}
    exec(compile(source, filename, "exec", dont_inherit=True), space)
    return space


def loaded(function: Callable[..., Any], folder: Path, position: int = 0) -> Callable[..., Any]:
    """The function as a run has it: from the file that was written."""
    return load(function_reference(function, folder, position))


CELL = '''
import math
import re
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache, wraps
from math import sqrt as root

DIGITS = re.compile(r"\\d", re.IGNORECASE)
WORTH = {"a": 1.5, "b": (2, None), "c": float("inf"), "s": {"x", "y"}}


def doubled(function):
    @WRAPS
    def twice(*given, **named):
        return [2 * each for each in function(*given, **named)]

    return twice


@dataclass
class Judge:
    scale: float = WORTH["a"]

    def score(self, text):
        return self.scale * len(DIGITS.findall(text)) + helper(text)


@lru_cache
def known(text):
    return len(text)


def helper(text, depth=0):
    # a comment
    if depth < 2:
        return helper(text, depth + 1)
    return root(Counter(text).total()) + math.pi + known(text) + len(WORTH["s"])


@doubled
def score(completions, **columns):
    """What it is."""
    return [Judge().score(text) for text in completions]
'''


@pytest.mark.parametrize("wraps", ["@wraps(function)", ""])
def test_a_cells_function_is_written_down_with_everything_it_uses(wraps: str, tmp_path: Path) -> None:
    score = in_a_cell(CELL.replace("@WRAPS", wraps))["score"]
    assert loaded(score, tmp_path)(completions=TEXTS) == score(completions=TEXTS)


WRAPPED = """
from functools import lru_cache, wraps
def scaled(by):
    def around(function):
        @wraps(function)
        def scaled_by(*given, **named):
            return [by * each for each in function(*given, **named)]
        return scaled_by
    return around
def raw(completions, **columns):
    return [len(each) * 1.0 for each in completions]
class Cfg:
    w, n = 2.0, None
    def of(self, each=1.0):
        return each * self.w
    def other(self):
        return 5.0
"""


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("score = scaled(-3.0)(raw)", None),
        ("by = -3.0\n@scaled(by)\ndef score(completions, **c):\n    return raw(completions)\nby = 1.0", None),
        ("wrapped = scaled(-3.0)(raw)\ndef score(completions, **c):\n    return wrapped(completions)", None),
        ("cached = lru_cache(scaled(2.0)(raw))\ndef score(completions, **c):\n  return cached((*completions,))", None),
        ("@scaled(2.0)\n@scaled(3.0)\ndef score(completions, **c):\n    return raw(completions)", None),
        ("function, by = 5, lambda: 2\none, two = scaled(2.0)(raw), scaled(3.0)(lambda completions, **c: [by()] * 3)\n"
         "def score(completions, **c):\n    return [function, *one(completions), *two(completions)]", None),
        ("def make():\n    even = lambda n: n == 0 or odd(n - 1)\n    odd = lambda n: n != 0 and even(n - 1)\n"
         "    return lambda completions, **c: [even(len(each)) for each in completions]\nscore = make()", None),
        ("def score(completions, sign=1, *, by=1, **c):\n    return [sign * by] * 3\nscore.__defaults__ = (-3,)\n"
         "score.__kwdefaults__ = {'by': 2}", None),
        ("def score(completions, sign=1, **c):\n    return [sign] * 3\nscore.__defaults__ = (3, 4)", "other default"),
        ("def score(completions, **c):\n    return [getattr(score, 'by', 1)] * 3\nscore.by = 3", None),
        ("Cfg.w = -3.0\nCfg.n = Cfg.w\ndef score(completions, **c):\n    return [Cfg.w, Cfg().of(), Cfg.n]", None),
        ("Cfg.of.__defaults__ = (-3.0,)\ndef score(completions, **c):\n    return [Cfg().of()] * 3", None),
        ("Cfg.of = scaled(2.0)(Cfg.of)\ndef score(completions, **c):\n    return Cfg().of(1)", "whose 'of' was set"),
        ("Cfg.of = Cfg.other\ndef score(completions, **c):\n    return Cfg().of()", "whose 'of' was set"),
        ("Cfg.n = raw\ndef score(completions, **c):\n    return Cfg.n(completions)", "whose 'n' was set"),
        ("Cfg.late = raw\ndef score(completions, **c):\n    return Cfg.late(completions)", "whose 'late' was set"),
        ("from dataclasses import dataclass\n@dataclass\nclass D:\n    w: float = 1.0\nD.w = 2.0\n"
         "def score(completions, **c):\n    return D().w", "whose 'w' was set"),
    ],
)  # fmt: skip
def test_what_is_written_is_what_the_function_does_and_not_what_its_source_once_said(
    source: str, told: str | None, tmp_path: Path
) -> None:
    score = in_a_cell(WRAPPED + source)["score"]
    if told is None:
        assert loaded(score, tmp_path)(completions=TEXTS) == score(completions=TEXTS)
        return
    with pytest.raises(ConfigError) as raised:
        function_reference(score, tmp_path)
    assert told in raised.value.what


def test_the_text_is_the_same_in_every_process_and_another_where_something_changed(tmp_path: Path) -> None:
    def name(source: str) -> str:
        return function_reference(in_a_cell(source.replace("@WRAPS", "@wraps(function)"))["score"], tmp_path)

    first = name(CELL)
    assert name(CELL.replace("# a comment", "# another, and longer")) == first
    others = {
        name(CELL.replace('"a": 1.5', '"a": 1.25')),
        name(CELL.replace("depth < 2", "depth < 3")),
        name(CELL.replace('r"\\d"', 'r"\\d+"')),
        name(CELL.replace("re.IGNORECASE", "0")),
    }
    assert len(others | {first}) == 5


def test_annotations_that_name_nothing_stay_unread_whichever_part_was_written_without(tmp_path: Path) -> None:
    space = in_a_cell("def helper(text):\n    return len(text)", cell="plain")
    source = "def score(completions: NoSuch, **c) -> Nor:\n    return [helper(text) for text in completions]"
    in_a_cell(f"from __future__ import annotations\n{source}", space, cell="later")
    assert loaded(space["score"], tmp_path)(completions=TEXTS) == [2, 2, 1]


def test_a_name_may_stand_for_equal_things_and_not_for_two_different_ones(tmp_path: Path) -> None:
    def scored(first: Any, second: Any) -> Callable[..., Any]:
        one = in_a_cell(f"LIMIT = {first!r}\ndef helper():\n    return LIMIT", cell=f"one{first}")
        source = f"LIMIT = {second!r}\ndef score(completions, **c):\n    return [LIMIT, helper()]"
        return in_a_cell(source, {"__name__": "__main__", "helper": one["helper"]}, cell=f"two{second}")["score"]

    assert loaded(scored([1, 2], [1, 2]), tmp_path)(completions=TEXTS) == [[1, 2], [1, 2]]
    with pytest.raises(ConfigError, match="two different things that are both called 'LIMIT'"):
        function_reference(scored([1, 2], [1, 3]), tmp_path)


def test_lambdas_on_one_line_are_told_apart(tmp_path: Path) -> None:
    scale = 3
    first, second = (lambda completions, **c: [1 for _ in completions]), (lambda completions, **c: [scale] * 3)
    outer = lambda: lambda completions, **c: [len(each) for each in completions]  # noqa: E731
    assert loaded(first, tmp_path)(completions=TEXTS) == [1, 1, 1]
    assert loaded(second, tmp_path, 1)(completions=TEXTS) == [3, 3, 3]
    assert function_reference(second, tmp_path, 1).endswith(":reward_1")
    assert loaded(outer(), tmp_path)(completions=TEXTS) == [2, 2, 1]


def test_classes_without_methods_come_along_from_any_cell(tmp_path: Path) -> None:
    space = in_a_cell("from enum import Enum\nclass Level(Enum):\n    EASY = 1\n    HARD = 2", cell="first")
    source = (
        "class Weights:\n    hard = 3.0\ndef score(completions, **c):\n    return [Weights.hard * Level.HARD.value]"
    )
    assert loaded(in_a_cell(source, space, "second")["score"], tmp_path)(completions=["x"]) == [6.0]


def test_what_encloses_a_function_comes_along(tmp_path: Path) -> None:
    def scaled(by: float) -> Callable[..., list[float]]:
        def score(completions: list[str], **columns: Any) -> list[float]:
            return [by * len(each) for each in completions]

        return score

    assert loaded(scaled(2.0), tmp_path)(completions=TEXTS) == [4.0, 4.0, 2.0]
    assert function_reference(scaled(2.0), tmp_path) != function_reference(scaled(3.0), tmp_path)


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("lock = __import__('threading').Lock()\ndef score(**c):\n    return lock", "uses 'lock', a _thread.lock"),
        ("API_KEY = 'x'\ndef score(**c):\n    return API_KEY", "uses 'API_KEY', which may be a secret"),
        ("def of(token):\n    return lambda **c: token\nscore = of('x')", "_token', which may be a secret"),
        ("def score(**c):\n    return 'sk-proj-4f9aB2cD8eF1gH3jK5mN7pQ9rS0tU2vW4xY6z'", "looks like a secret"),
        ("data = ['x' * 100] * 20000\ndef score(**c):\n    return data", "uses 'data', 2080000 characters of data"),
    ],
)
def test_what_has_no_text_is_refused_by_name(source: str, told: str, tmp_path: Path) -> None:
    score = in_a_cell(source)["score"]
    with pytest.raises(ConfigError) as raised:
        function_reference(score, tmp_path)
    assert told in raised.value.what and raised.value.hints
    assert not list(tmp_path.iterdir())


def test_a_function_that_changes_what_encloses_it_is_refused(tmp_path: Path) -> None:
    def counting() -> Callable[..., int]:
        count = 0

        def score(**columns: Any) -> int:
            nonlocal count
            count += 1
            return count

        return score

    with pytest.raises(ConfigError, match="'score' does not stand alone"):
        function_reference(counting(), tmp_path)


def test_a_function_without_source_is_refused(tmp_path: Path) -> None:
    space: dict[str, Any] = {"__name__": "__main__"}
    exec("def score(**c): return 1", space)
    with pytest.raises(ConfigError, match="has no source here"):
        function_reference(space["score"], tmp_path)


class Scorer:
    def __call__(self, completions: list[str], **columns: Any) -> list[float]:
        return [0.0 for _ in completions]


@pytest.mark.parametrize("given", [Scorer(), functools.partial(max, 1), Scorer().__call__, 3])
def test_what_is_no_function_is_refused(given: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a reward is a function"):
        function_reference(given, tmp_path)


def module_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> ModuleType:
    import importlib

    file = tmp_path / "src" / (name.replace(".", "/") + ".py")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path / "src"))
    for loaded in [name, name.partition(".")[0]]:
        monkeypatch.delitem(sys.modules, loaded, raising=False)
    return importlib.import_module(name)


def test_a_function_of_a_file_goes_by_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = module_of(tmp_path, monkeypatch, "scores_of_a_list", "def score(**c):\n    return [1.0]\n")
    assert function_reference(module.score, tmp_path / "given") == f"{module.__file__}:score"
    assert not (tmp_path / "given").exists()


def test_a_function_of_a_package_goes_by_the_module_where_others_find_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = module_of(tmp_path, monkeypatch, "own_package.scores", "def score(**c):\n    return [1.0]\n")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    with pytest.raises(ConfigError, match="not to be found") as raised:
        function_reference(module.score, tmp_path)
    assert raised.value.hints[0].startswith(f"export PYTHONPATH={tmp_path / 'src'} ")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "src"))
    assert function_reference(module.score, tmp_path) == "own_package.scores:score"


def test_a_module_of_ones_own_that_is_used_counts_with_its_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module_of(tmp_path, monkeypatch, "own_helpers", "def norm(text):\n    return text.strip()\n")
    space = in_a_cell(
        "from own_helpers import norm\n"
        "def score(completions, **c):\n    return [len(norm(each)) for each in completions]"
    )
    text = written_down(space["score"], "score")
    assert f"sys.path.append('{tmp_path / 'src'}')" in text and "from own_helpers import norm" in text
    (tmp_path / "score.py").write_text(text)
    # As in another process, which finds the module by the text alone.
    monkeypatch.delitem(sys.modules, "own_helpers")
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != str(tmp_path / "src")])
    code = Code()
    code.add_file(tmp_path / "score.py")
    assert {"file score.py", "file own_helpers.py"} == set(code.files)


def test_numbers_that_have_no_literal_are_written_down() -> None:
    space = in_a_cell(
        "bounds = [float('-inf'), float('nan'), -0.0, 1e300, 2**70, b'x', frozenset([1])]\n"
        "def f(**c):\n    return bounds"
    )
    names: dict[str, Any] = {}
    exec(written_down(space["f"], "f"), names)
    low, nan, *rest = names["f"]()
    assert low == -math.inf and math.isnan(nan)
    assert rest == [-0.0, 1e300, 2**70, b"x", frozenset([1])]


def test_a_default_argument_is_the_value_that_the_function_has(tmp_path: Path) -> None:
    source = (
        "made = []\n"
        "for k in (1, 2):\n"
        "    made.append(lambda completions, k=k, **columns: [k] * len(completions))\n"
        "def weighed(completions, scale=[k], *, share=-k, **columns):\n"
        "    return [scale[0] * share] * len(completions)\n"
        "k = 7\n"
    )
    space = in_a_cell(source)
    functions = [*space["made"], space["weighed"]]
    assert [loaded(each, tmp_path, place)(TEXTS[:1]) for place, each in enumerate(functions)] == [[1], [2], [-4]]


def test_a_default_argument_without_a_text_is_made_anew_or_refused_and_a_variable_is_read_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OWN_VALUE", "here")
    source = (
        "import os, threading\n"
        "from collections import deque\n"
        "lock = threading.Lock()\n"
        "def made(completions, seen=deque(maxlen=3), own=os.environ['OWN_VALUE'], **columns):\n"
        "    return [seen.maxlen, own]\n"
        "def refused(completions, lock=lock, **columns):\n"
        "    return []\n"
        "password = 'open sesame'\n"
        "def told(completions, password=password, **columns):\n"
        "    return []\n"
    )
    space = in_a_cell(source)
    monkeypatch.setenv("OWN_VALUE", "there")
    assert loaded(space["made"], tmp_path)(TEXTS) == [3, "there"]
    with pytest.raises(ConfigError, match=r"default of its argument 'lock' is a _thread\.lock"):
        written_down(space["refused"], "reward")
    with pytest.raises(ConfigError, match="default of its argument 'password' may be a secret"):
        written_down(space["told"], "reward")


@pytest.mark.parametrize("kind", ["@classmethod", "@staticmethod", "@property", ""])
def test_a_class_of_another_place_sees_what_is_around_it_there(kind: str, tmp_path: Path) -> None:
    source = f"HIDDEN = 3.0\nclass Judge:\n    {kind or '...'}\n    def of(*given):\n        return HIDDEN\n"
    there = in_a_cell(source, cell=f"judge{kind}")
    call = "Judge().of" + ("" if kind == "@property" else "()")
    source = f"def score(completions, **c):\n    return [{call}]\n"
    space = in_a_cell(source, {"__name__": "__main__", "Judge": there["Judge"]}, cell="score")
    assert loaded(space["score"], tmp_path)(completions=TEXTS) == [3.0]


def test_a_name_of_pythons_own_that_means_another_thing_here_comes_along(tmp_path: Path) -> None:
    source = "def len(text):\n    return 7.0\ndef score(completions, **c):\n    return [len(t) for t in completions]\n"
    assert loaded(in_a_cell(source)["score"], tmp_path)(completions=TEXTS) == [7.0] * 3


def test_modules_and_names_keep_what_they_are_called_here(tmp_path: Path) -> None:
    source = (
        "import math as m, os.path\nfrom math import floor as down\n"
        "def score(completions, **c):\n    return [m.pi, down(2.5), os.path.join('a', 'b')]\n"
    )
    space = in_a_cell(source)
    text = written_down(space["score"], "score")
    assert text.splitlines()[:2] == ["from math import floor as down", "import math as m"]
    assert loaded(space["score"], tmp_path)(completions=TEXTS) == [math.pi, 2, "a/b"]


def test_the_running_program_is_no_module_that_another_process_has() -> None:
    source = "def score(completions, **c):\n    return program.x\n"
    space = in_a_cell(source, {"__name__": "__main__", "program": sys.modules["__main__"]})
    with pytest.raises(ConfigError, match="uses the running program as a module"):
        written_down(space["score"], "score")


def test_a_default_that_was_made_of_other_things_is_refused_and_one_of_getenv_is_read_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = (
        "import os\nfrom collections import deque\n"
        "size = 3\n"
        "def made(completions, own=os.getenv('OWN_VALUE'), *, last=deque(maxlen=2), kept=None, **c):\n"
        "    return [own, last.maxlen, kept]\n"
        "def refused(completions, seen=deque(maxlen=size), **c):\n    return []\n"
    )
    space = in_a_cell(source)
    monkeypatch.setenv("OWN_VALUE", "there")
    assert loaded(space["made"], tmp_path)(completions=TEXTS) == ["there", 2, None]
    with pytest.raises(ConfigError, match=r"default of its argument 'seen' is a collections\.deque"):
        written_down(space["refused"], "score")


def test_constants_within_constants_are_written_down_and_what_one_of_them_has_no_text_for_is_refused() -> None:
    source = (
        "LOCK = object()\nALL = {(1,): [1j, {'a': None}], 'x': ({2, 1}, ())}\n"
        "BAD = {'a': [1, LOCK]}\nKEY = {(LOCK,): 1}\n"
        "def f(**c):\n    return ALL\ndef g(**c):\n    return BAD\ndef h(**c):\n    return KEY\n"
    )
    space = in_a_cell(source)
    names: dict[str, Any] = {}
    exec(written_down(space["f"], "f"), names)
    assert names["f"]() == space["ALL"] and type(names["f"]()["x"][1]) is tuple
    for name, used in (("g", "BAD"), ("h", "KEY")):
        with pytest.raises(ConfigError, match=f"uses '{used}', a builtins.dict of this process"):
            written_down(space[name], name)


def test_a_constant_may_be_as_long_as_the_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nemotron_steps.api.source_text._LONGEST", 7)
    space = in_a_cell("A, B = 'abcde', 'abcdef'\ndef f(**c):\n    return A\ndef g(**c):\n    return B\n")
    assert "A = 'abcde'" in written_down(space["f"], "f")
    with pytest.raises(ConfigError, match="'B', 8 characters of data"):
        written_down(space["g"], "g")
