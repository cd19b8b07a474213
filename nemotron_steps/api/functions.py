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
        what = "a reward is a function: what holds a state of its own cannot be taken to another process"
        expected, found = "def NAME(prompts, completions, **columns), or 'FILE.py:NAME'", type(function).__name__
        raise ConfigError(what, where=f"rewards[{position}]", expected=expected, found=found)
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
    try:
        text = _written(function)
    except _NotWritable as why:
        what = f"the reward function '{name}' cannot be written down: {why}"
        expected = "a plain `def` that uses imports, other such functions, numbers, texts, lists and mappings"
        hints = ("rewards=['rewards.py:NAME']   # put it into a file, with what it needs",)
        raise ConfigError(what, where=f"rewards[{position}]", expected=expected, hints=hints) from None
    file = folder / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}.py"
    if not file.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(file, text.encode())
    return f"{file.absolute()}:{name}"


class _NotWritable(Exception):
    """Why there is no text for a function, or for something that it uses."""


def _written(subject: FunctionType) -> str:
    """A module that defines a function, with the functions, imports and constants that it uses."""
    known: dict[str, Any] = {}
    imports: set[str] = set()
    folders: set[str] = set()
    texts: list[str] = []

    def define(name: str, value: Any) -> None:
        if name in known:
            if known[name] is not value:
                raise _NotWritable(f"it uses two different things that are both called '{name}'")
            return
        known[name] = value
        is_module = isinstance(value, ModuleType) and value.__name__ != "__main__"
        module = value if is_module else sys.modules.get(getattr(value, "__module__", None) or "")
        own = str(getattr(value, "__qualname__", None) or getattr(value, "__name__", ""))
        if module is not None and (is_module or ("." not in own and _importable(value, module))):
            statement = "import " if is_module else f"from {module.__name__} import "
            imports.add(f"{statement}{own}" + (f" as {name}" if name != own else ""))
            file = getattr(module, "__file__", None)
            if file and not any(Path(file).is_relative_to(path) for path in sysconfig.get_paths().values()):
                folders.add(_root_of(module))  # one of the user's own, which is part of the cache key from there
        elif isinstance(value, FunctionType) and own != name and own.isidentifier():
            define(own, value)
            texts.append(f"{name} = {own}")
        elif isinstance(value, FunctionType):
            text = _definition(value)
            for used in dict.fromkeys(_names_used(compile(text, own, "exec", annotations.compiler_flag))):
                if used in value.__globals__ and used != own:
                    define(used, value.__globals__[used])
            texts.append(text)
        elif isinstance(value, re.Pattern):
            define("re", re)
            texts.append(f"{name} = re.compile({value.pattern!r}, {value.flags})")
        elif is_secret_key(name):
            raise _NotWritable(f"it uses '{name}', which may be a secret and is written nowhere")
        else:
            try:
                texts.append(f"{name} = {_literal(value)}")
            except TypeError:
                kind = "class" if isinstance(value, type) else f"{type(value).__module__}.{type(value).__qualname__}"
                raise _NotWritable(f"it uses '{name}', a {kind} of this process") from None

    define(subject.__name__, subject)
    paths = [f"sys.path.append({folder!r})" for folder in sorted(folders)]
    head = ["from __future__ import annotations", *(["import sys", *paths] if paths else [])]
    text = "\n".join([*head, *sorted(imports), *texts]) + "\n"
    if redact_text(text) != text:
        raise _NotWritable("it holds a text that looks like a secret, which is written nowhere")
    return text


def _definition(function: FunctionType) -> str:
    """A function's `def`, without comments, which make no other function."""
    own = function.__name__
    if not own.isidentifier():
        raise _NotWritable("a lambda has no name")
    if function.__closure__:
        around = ", ".join(function.__code__.co_freevars)
        raise _NotWritable(f"'{own}' uses {around} of the function that it is defined in")
    try:
        source = inspect.getsource(function)
        # Not dedented: that would change what texts of several lines say.
        tree = ast.parse(f"if True:\n{source}" if source[:1].isspace() else source)
    except (OSError, SyntaxError):
        raise _NotWritable(f"'{own}' has no source here (typed into `python`, or made by code)") from None
    node = next(each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef))
    if vars(function):
        raise _NotWritable(f"'{own}' is decorated, or has attributes, which are not in its source")
    as_written = None
    with suppress(ValueError):
        defaults = (*node.args.defaults, *filter(None, node.args.kw_defaults))
        as_written = [ast.literal_eval(each) for each in defaults]
    if as_written != [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]:
        raise _NotWritable(f"default arguments of '{own}' are not constants")
    return ast.unparse(node)


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
        return f"{type(value).__name__}([{', '.join(parts if isinstance(value, list | tuple) else sorted(parts))}])"
    if type(value) is float and not math.isfinite(value):
        return f"float('{value}')"
    if value is None or type(value) in (bool, int, float, str, bytes):
        return repr(value)
    raise TypeError(type(value))


def _importable(value: Any, module: ModuleType) -> bool:
    """Whether importing the module in another process and looking the value up by its name gives it."""
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None) or ""
    builtin = getattr(module, "__spec__", None) is not None
    if module.__name__ == "__main__" or not name or not (builtin or getattr(module, "__file__", None)):
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
