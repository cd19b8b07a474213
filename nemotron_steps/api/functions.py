"""A reward function of this process → the name that a run knows it by, in every process and when it is resumed.

A function of an installed or importable package is `MODULE:NAME`, one of a file beside the program `FILE.py:NAME`. One
that no import reaches (of a notebook, or of the program that is running) is written down, in the home under the digest
of its text: `inspect.getsource` of it and of the functions that it uses, with the imports and constants that they name
(docs/decisions/rewards-from-notebooks.md). One of a package that only this process's sys.path leads to is a file that
imports it from there.
"""

from __future__ import annotations

import ast
import dis
import hashlib
import inspect
import math
import os
import re
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from nemotron_steps.artifacts.files import write_atomic
from nemotron_steps.config.secrets import is_secret_key, redact_text
from nemotron_steps.errors import ConfigError

Reward = str | Callable[..., Any]


def function_reference(function: Reward, folder: Path, position: int = 0) -> str:
    """`FILE.py:NAME` or `MODULE:NAME` of a reward function, or of such a text as it is. `folder` gets the file of one
    that has to be written down. ConfigError for what is not a function, or cannot be written down."""
    if isinstance(function, str):
        return function
    if not isinstance(function, FunctionType):
        name = getattr(function, "__name__", None)
        named = name if isinstance(name, str) and not isinstance(function, type) else type(function).__name__
        raise ConfigError(
            "a reward is a function: what holds a state of its own cannot be taken to another process",
            where=f"rewards[{position}]",
            expected="def NAME(prompts, completions, **columns), or 'FILE.py:NAME'",
            found=named,
            hints=(f"def reward(completions, **columns): return {named}(...)",),
        )
    module = sys.modules.get(function.__module__)
    if module is not None and _importable(function, module):
        if "." not in module.__name__ and not hasattr(module, "__path__"):
            return f"{Path(inspect.getsourcefile(module) or '').absolute()}:{function.__qualname__}"
        # Where a fresh process finds a package as this one does.
        known = [os.getcwd(), *sysconfig.get_paths().values(), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        known += [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
        if _root_of(module) in {str(Path(path).absolute()) for path in known if path}:
            return f"{module.__name__}:{function.__qualname__}"
    name = function.__name__
    capture = _Capture(name, position)
    capture.define(name, function)
    text = capture.text()
    file = folder / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}.py"
    if not file.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(file, text.encode())
    return f"{file.absolute()}:{name}"


class _Capture:
    """A module that defines a reward function (`subject`, at a `position` among the rewards), as far as it goes."""

    def __init__(self, subject: str, position: int) -> None:
        self._subject = subject
        self._position = position
        self._known: dict[str, Any] = {}
        self._imports: set[str] = set()
        self._folders: set[str] = set()
        self._texts: list[str] = []

    def text(self) -> str:
        """The module. ConfigError if it holds a secret."""
        paths = [f"sys.path.append({folder!r})" for folder in sorted(self._folders)]
        head = ["from __future__ import annotations", *(["import sys", *paths] if paths else [])]
        text = "\n".join([*head, *sorted(self._imports), *self._texts]) + "\n"
        if redact_text(text) != text:
            raise self._refused("it holds a text that looks like a secret, which is written nowhere")
        return text

    def define(self, name: str, value: Any) -> None:
        """Make `name` mean a value, with what that uses. ConfigError if there is no text for it."""
        if name in self._known:
            if self._known[name] is not value:
                raise self._refused(f"it uses two different things that are both called '{name}'")
            return
        self._known[name] = value
        module = sys.modules.get(getattr(value, "__module__", None) or "")
        own = str(getattr(value, "__qualname__", None) or getattr(value, "__name__", ""))
        if isinstance(value, ModuleType) and own != "__main__":
            self._import(value, "import ", own, name)
        elif module is not None and "." not in own and _importable(value, module):
            self._import(module, f"from {module.__name__} import ", own, name)
        elif isinstance(value, FunctionType):
            self._define_function(name, value)
        elif isinstance(value, re.Pattern):
            self.define("re", re)
            self._texts.append(f"{name} = re.compile({value.pattern!r}, {value.flags})")
        elif is_secret_key(name):
            raise self._refused(f"it uses '{name}', which may be a secret and is written nowhere")
        else:
            try:
                self._texts.append(f"{name} = {_literal(value)}")
            except TypeError:
                kind = "class" if isinstance(value, type) else f"{type(value).__module__}.{type(value).__qualname__}"
                raise self._refused(f"it uses '{name}', a {kind} of this process") from None

    def _import(self, module: ModuleType, statement: str, own: str, name: str) -> None:
        self._imports.add(f"{statement}{own}" + (f" as {name}" if name != own else ""))
        file = getattr(module, "__file__", None)
        if file and not any(Path(file).is_relative_to(path) for path in sysconfig.get_paths().values()):
            self._folders.add(_root_of(module))  # one of the user's own, which is part of the cache key from there

    def _define_function(self, name: str, function: FunctionType) -> None:
        own = function.__name__
        if own != name:
            self.define(own, function)
            self._texts.append(f"{name} = {own}")
            return
        if not own.isidentifier():
            raise self._refused("a lambda has no name")
        node = None
        with suppress(OSError, SyntaxError):
            source = inspect.getsource(function)
            # Not dedented: that would change what texts of several lines say.
            tree = ast.walk(ast.parse(f"if True:\n{source}" if source[:1].isspace() else source))
            kinds = ast.FunctionDef | ast.AsyncFunctionDef
            node = next((each for each in tree if isinstance(each, kinds) and each.name == own), None)
        if vars(function) or (node is not None and node.decorator_list):
            raise self._refused(f"'{own}' is decorated, or has attributes, which are not in its source")
        if function.__closure__:
            around = ", ".join(function.__code__.co_freevars)
            raise self._refused(f"'{own}' uses {around} of the function that it is defined in")
        if node is None:
            raise self._refused(f"'{own}' has no source here (typed into `python`, or made by code)")
        defaults = [*node.args.defaults, *(each for each in node.args.kw_defaults if each is not None)]
        given = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        as_written = None
        with suppress(ValueError):
            as_written = [ast.literal_eval(each) for each in defaults]
        if as_written != given:
            raise self._refused(f"default arguments of '{own}' are not constants")
        text = ast.unparse(node)  # without comments, which make no other function
        self._texts.append(text)
        for used in dict.fromkeys(_names_used(compile(text, own, "exec", annotations.compiler_flag))):
            if used in function.__globals__:
                self.define(used, function.__globals__[used])

    def _refused(self, what: str) -> ConfigError:
        name = self._subject if self._subject.isidentifier() else "NAME"
        return ConfigError(
            f"the reward function '{self._subject}' cannot be written down: {what}",
            where=f"rewards[{self._position}]",
            expected="a plain `def` that uses imports, other such functions, numbers, texts, lists and mappings",
            hints=(f"rewards=['rewards.py:{name}']   # put it into a file, with what it needs",),
        )


def _names_used(code: CodeType) -> Iterator[str]:
    """Global names that code looks up, that of functions and classes within it too, in the order of first use."""
    for instruction in dis.get_instructions(code):
        name = str(instruction.argval)
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS") and name[:2] != "__":
            yield name
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_used(constant)


def _literal(value: Any) -> str:
    """A constant as Python writes it, the same in every process. TypeError for anything else."""
    if type(value) is dict:
        return "{" + ", ".join(f"{_literal(key)}: {_literal(each)}" for key, each in value.items()) + "}"
    if type(value) in (list, tuple, set, frozenset):
        parts = [_literal(each) for each in value]
        listed = ", ".join(sorted(parts) if isinstance(value, set | frozenset) else parts)
        return f"[{listed}]" if type(value) is list else f"{type(value).__name__}([{listed}])"
    if type(value) is float and not math.isfinite(value):
        return f"float('{value}')"
    if value is None or type(value) in (bool, int, float, str, bytes):
        return repr(value)
    raise TypeError(type(value))


def _importable(value: Any, module: ModuleType) -> bool:
    """Whether importing the module in another process and looking the value up by its name gives it."""
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None) or ""
    file = getattr(module, "__file__", None)
    builtin = getattr(module, "__spec__", None) is not None and file is None
    if module.__name__ == "__main__" or not name or not (builtin or file):
        return False
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    return found is value


def _root_of(module: ModuleType) -> str:
    """The folder that has to be on sys.path for the module to be found."""
    file = Path(module.__file__ or "").absolute()
    depth = module.__name__.count(".") + (1 if hasattr(module, "__path__") else 0)
    return str(file.parents[depth])
