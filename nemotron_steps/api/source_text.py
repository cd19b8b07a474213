"""A function as the text of a module that defines it, with everything of this process that it uses.

What the function names is looked up where it would look (what encloses it, then its globals) and written down in turn:
imports, functions and classes, plain constants, compiled patterns. Anything else has no text, and is refused by name.
Texts are normalised (`ast.unparse`), so that a comment or a blank line does not make another function.
"""

from __future__ import annotations

import ast
import builtins
import dis
import functools
import linecache
import math
import re
import sys
import sysconfig
from collections.abc import Iterator
from enum import EnumMeta
from pathlib import Path
from types import CodeType, FunctionType, MemberDescriptorType, ModuleType
from typing import Any

from nemotron_steps.config.redaction import is_secret_key, redact_text
from nemotron_steps.errors import ConfigError

Syntax = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda

_LONGEST = 1_000_000
"""Characters of a constant: more is data, and belongs into a file."""
_ANNOTATIONS = annotations.compiler_flag
"""Of code whose annotations are not evaluated."""
_IN_FILE = "rewards=['rewards.py:NAME']   # put it into a file, with what it needs"


def written_down(function: FunctionType, name: str) -> str:
    """The text of a module that defines `name` as the function.

    Raises ConfigError for a function whose source is not to be had, or that uses what has no text.
    """
    capture = _Capture(function.__name__ if function.__name__.isidentifier() else name)
    capture.define(name, function)
    return capture.text()


def importable(value: Any, module: ModuleType) -> bool:
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


def root_of(module: ModuleType) -> str:
    """The folder that has to be on sys.path for the module to be found."""
    file = Path(module.__file__ or "").absolute()
    depth = module.__name__.count(".") + (1 if hasattr(module, "__path__") else 0)
    return str(file.parents[depth])


class _Capture:
    """What is written down so far.

    Args:
        subject: the reward function's name, for errors.
    """

    def __init__(self, subject: str) -> None:
        self._subject = subject
        self._known: dict[str, Any] = {}
        self._imports: dict[str, None] = {}
        self._paths: dict[str, None] = {}
        self._texts: list[str] = []
        self._future = False
        self._files: dict[str, None] = {}
        self._around: dict[str, Any] = {}
        self._open: list[int] = []
        """What is being written: functions that call one another find each other by name."""

    def text(self) -> str:
        """The module."""
        head = ["from __future__ import annotations"] if self._future else []
        if self._paths:
            head += ["import sys", *(f"sys.path.append({path!r})" for path in sorted(self._paths))]
        text = "\n".join([*head, *sorted(self._imports), *self._texts]) + "\n"
        if redact_text(text) != text:
            raise self._refused(
                "it holds a text that looks like a secret, which is written nowhere", "os.environ['NAME']"
            )
        return text

    def define(self, name: str, value: Any) -> None:
        """Make `name` mean a value, with what that uses. ConfigError if there is no text for it."""
        if self._means(name, value):
            return
        if name in self._known:
            raise self._refused(f"it uses two different things that are both called '{name}'", "another name for one")
        self._known[name] = value
        if isinstance(value, ModuleType):
            self._import_module(name, value)
            return
        module = sys.modules.get(getattr(value, "__module__", None) or "")
        if module is not None and importable(value, module) and "." not in getattr(value, "__qualname__", ""):
            self._take_from(module)
            own = getattr(value, "__qualname__", None) or value.__name__
            self._imports[f"from {module.__name__} import {own}" + (f" as {name}" if own != name else "")] = None
        elif isinstance(value, FunctionType | type):
            self._define_code(name, value)
        elif isinstance(value, functools._lru_cache_wrapper) and isinstance(value.__wrapped__, FunctionType):
            self._imports["import functools"] = None
            self._define_code(name, value.__wrapped__)
            self._texts.append(f"{name} = functools.lru_cache(**{value.cache_parameters()})({name})")
        elif isinstance(value, re.Pattern):
            self._imports["import re"] = None
            self._texts.append(f"{name} = re.compile({value.pattern!r}, {value.flags})")
        else:
            if is_secret_key(name):
                raise self._refused(
                    f"it uses '{name}', which may be a secret and is written nowhere", f"os.environ['{name}']"
                )
            literal = _literal(value)
            if literal is None:
                described = f"{type(value).__module__}.{type(value).__qualname__}"
                raise self._refused(f"it uses '{name}', a {described} of this process")
            if len(literal) > _LONGEST:
                raise self._refused(
                    f"it uses '{name}', {len(literal)} characters of data", f"read '{name}' from a file"
                )
            self._texts.append(f"{name} = {literal}")

    def _means(self, name: str, value: Any) -> bool:
        return name in self._known and (self._known[name] is value or bool(self._known[name] == value))

    def _import_module(self, name: str, module: ModuleType) -> None:
        if module.__name__ == "__main__":
            raise self._refused("it uses the running program as a module")
        self._take_from(module)
        self._imports[f"import {module.__name__}" + (f" as {name}" if name != module.__name__ else "")] = None

    def _take_from(self, module: ModuleType) -> None:
        """Let the module be found: one of the user's own is part of the cache key from there."""
        file = getattr(module, "__file__", None)
        if file is None or _is_installed(file):
            return
        self._paths[root_of(module)] = None

    def _define_code(self, name: str, value: Any) -> None:
        """A function or class by its source, after everything that it uses."""
        node, function = self._place_of(value)
        if node is None:
            raise self._refused(
                f"{type(value).__name__} '{name}' has no source here (typed into `python -c`, or made by code)"
            )
        if isinstance(node, ast.ClassDef):
            self._define_attributes(name, node, value)
            text = ast.unparse(node) + (f"\n{name} = {node.name}" if node.name != name else "")
        else:
            assert function is not None  # only a class has a place without one
            self._define_defaults(name, node.args, function)
            if isinstance(node, ast.Lambda):
                text = f"{name} = {ast.unparse(node)}"
            else:
                # What a decorator was given, and not what it made of it: that is a function of its own.
                node.decorator_list, node.name = [], name
                text = ast.unparse(node)
        if function is not None:
            self._future |= bool(function.__code__.co_flags & _ANNOTATIONS)
        try:
            compiled = compile(text, "<reward>", "exec", dont_inherit=True)
        except SyntaxError as error:
            raise self._refused(f"'{name}' does not stand alone: {error.msg}") from error
        around = _surroundings(value) if function is not None else self._around
        before, self._around = self._around, around
        own: dict[str, str] = {}
        for used in _names_used(compiled):
            if used in around and not (used == name and around[used] is value):
                closed_over = function is value and used in function.__code__.co_freevars
                if closed_over and not self._means(used, around[used]) and id(around[used]) not in self._open:
                    own[used] = f"of_{name}_{used}"
                self._open.append(id(around[used]))
                self.define(own.get(used, used), around[used])
                self._open.pop()
        self._around = before
        self._texts.append(_made_with(text, name, own) if own else text)
        held = {} if function is not value else {key: _literal(each) for key, each in vars(function).items()}
        for key, literal in held.items():
            if literal is not None and not is_secret_key(key):
                self._texts.append(f"{name}.{key} = {literal}")

    def _define_defaults(self, name: str, arguments: ast.arguments, function: FunctionType) -> None:
        """Let default arguments be the values that they have: what they were made of may mean another thing by now.

        One that is read from the environment stays so: it may be a secret.
        """
        counts = len(function.__defaults__ or ()), sorted(function.__kwdefaults__ or ())
        keywords = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        if counts != (len(arguments.defaults), sorted(each.arg for each, default in keywords if default is not None)):
            raise self._refused(f"'{name}' was given other default arguments than its source has")
        positional = [*arguments.posonlyargs, *arguments.args]
        values = dict(
            zip([each.arg for each in reversed(positional)], reversed(function.__defaults__ or ()), strict=False)
        )
        values |= function.__kwdefaults__ or {}

        def named(argument: ast.arg, default: ast.expr) -> ast.expr:
            value = values[argument.arg]
            if _is_written(default, _literal(value)) or _reads_environment(default):
                return default
            if not _has_text(value):
                if _makes_one(default):
                    return default
                described = f"{type(value).__module__}.{type(value).__qualname__}"
                raise self._refused(f"the default of its argument '{argument.arg}' is a {described} of this process")
            if is_secret_key(argument.arg):
                raise self._refused(
                    f"the default of its argument '{argument.arg}' may be a secret and is written nowhere",
                    "os.environ['NAME']",
                )
            own = f"default_of_{name}_{argument.arg}"
            self.define(own, value)
            return ast.Name(own, ast.Load())

        first = len(positional) - len(arguments.defaults)
        arguments.defaults = [named(*pair) for pair in zip(positional[first:], arguments.defaults, strict=True)]
        arguments.kw_defaults = [
            None if default is None else named(argument, default)
            for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        ]

    def _define_attributes(self, name: str, node: ast.ClassDef, value: type) -> None:
        """Let a class have the constants that it has now, and refuse what else was set after its body."""
        if isinstance(value, EnumMeta) or hasattr(value, "_field_defaults"):  # which Python guards, or makes itself
            return
        body: dict[str, ast.stmt] = {}
        for each in node.body:
            targets = getattr(each, "targets", [getattr(each, "target", each)])
            body |= {getattr(target, "id", getattr(target, "name", "")): each for target in targets}
        fields = getattr(value, "__dataclass_fields__", {})
        for key, held in vars(value).items():
            place, literal, function = body.get(key), _literal(held), getattr(held, "__func__", held)
            expression = getattr(place, "value", None)
            is_function = isinstance(function, FunctionType)
            if isinstance(place, ast.FunctionDef | ast.AsyncFunctionDef) and not place.decorator_list:
                fits = is_function and function.__code__.co_firstlineno == place.lineno
                if fits:
                    self._define_defaults(f"{name}_{key}", place.args, function)
            elif key[:2] == key[-2:] == "__" and place is None:
                fits = not is_function or _is_installed(function.__code__.co_filename)
            elif literal is None:
                fits = isinstance(held, MemberDescriptorType) or key == "_abc_impl" or place is not None
                fits = fits and not isinstance(expression, ast.Constant)
            else:
                fits = key not in fields or _literal(fields[key].default) == literal
                kept = expression is not None and (
                    _reads_environment(expression)
                    or is_secret_key(key)
                    or (key in fields and isinstance(expression, ast.Call))
                )
                if fits and not kept and not _is_written(expression, literal):
                    node.body += ast.parse(f"{key} = {literal}").body
            if not fits:
                raise self._refused(f"it uses '{name}', whose '{key}' was set after its class was made")

    def _place_of(self, value: Any) -> tuple[Syntax | None, FunctionType | None]:
        """The syntax that a function or a class comes from, and a function of that place."""
        for function in _functions_of(value):
            file = function.__code__.co_filename
            node = _node_of(value, file, function.__code__)
            if node is not None:
                self._files[file] = None
                return node, function
        if isinstance(value, type):  # without methods: where others were found, or in the newest cell that has it
            cells = [file for file in linecache.cache if "ipykernel" in file or "ipython" in file]
            for file in (*self._files, *reversed(cells)):
                node = _node_of(value, file, None)
                if node is not None:
                    return node, None
        return None, None

    def _refused(self, what: str, instead: str | None = None) -> ConfigError:
        hints = ([f"{instead}   # inside the function"] if instead else []) + [_IN_FILE]
        return ConfigError(
            f"the reward function '{self._subject}' cannot be written down: {what}",
            where="rewards",
            expected="imports, functions, classes, numbers, texts, lists and mappings of them",
            hints=hints,
        )


def _is_installed(file: str) -> bool:
    """Whether a file comes with Python or a package, or code is of no file: made by a library."""
    return file[0] == "<" or any(Path(file).is_relative_to(path) for path in set(sysconfig.get_paths().values()))


def _made_with(text: str, name: str, own: dict[str, str]) -> str:
    """A function in one that is given what it closes over: variables of names that mean other things elsewhere."""
    (made,) = ast.parse(text).body
    if isinstance(made, ast.Assign):
        made.targets = [ast.Name(f"made_{name}", ast.Store())]
    else:
        made.name = f"made_{name}"  # type: ignore[attr-defined]
    (maker,) = ast.parse(f"def make_{name}({', '.join(own)}):\n    return made_{name}").body
    maker.body.insert(0, made)  # type: ignore[attr-defined]
    return f"{ast.unparse(maker)}\n{name} = make_{name}({', '.join(own.values())})"


def _surroundings(value: Any) -> dict[str, Any]:
    """What a function or a class sees around it."""
    functions = _functions_of(value)
    found: dict[str, Any] = {}
    for function in functions:
        found |= function.__globals__
    for function in functions:
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        for name, cell in cells:
            if name != "__class__":
                try:
                    found[name] = cell.cell_contents
                except ValueError:  # not assigned yet
                    continue
    return {name: each for name, each in found.items() if getattr(builtins, name, found) is not each}


def _functions_of(value: Any) -> list[FunctionType]:
    """The functions whose code a function or a class is."""
    if isinstance(value, FunctionType):
        return [value]
    methods = (getattr(each, "__func__", getattr(each, "fget", each)) for each in vars(value).values())
    return [each for each in methods if isinstance(each, FunctionType)]


def _lines(file: str) -> list[str]:
    linecache.checkcache(file)
    return linecache.getlines(file)


def _node_of(value: Any, file: str, code: CodeType | None) -> Syntax | None:
    """The syntax in a file that a function's code, or a class with that code in it, comes from; None if there is none.

    Args:
        code: None for a class without any.
    """
    try:
        tree = ast.parse("".join(_lines(file)))
    except SyntaxError:
        return None
    if isinstance(value, type):
        classes = [
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.ClassDef)
            and node.name == value.__name__
            and (code is None or node.lineno <= code.co_firstlineno <= (node.end_lineno or 0))
        ]
        return classes[-1] if classes else None
    if code is None:
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == code.co_name:
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            if first == code.co_firstlineno:
                return node
    lambdas = [n for n in ast.walk(tree) if isinstance(n, ast.Lambda) and _within(code, n.body)]
    return max(lambdas, key=lambda node: (node.body.lineno, node.body.col_offset), default=None)


def _within(code: CodeType, body: ast.expr) -> bool:
    """Whether every instruction that comes from somewhere comes from this expression. So it is for the lambda's own,
    and for that of a lambda around it, which begins before it."""
    places = [each.positions for each in dis.get_instructions(code) if each.positions is not None]
    spans = [
        ((place.lineno, place.col_offset), (place.end_lineno, place.end_col_offset))
        for place in places
        if None not in place
    ]
    begin, end = (body.lineno, body.col_offset), (body.end_lineno, body.end_col_offset)
    return bool(spans) and all(begin <= first and last <= end for first, last in spans if first != last)  # type: ignore[operator]


def _names_used(code: CodeType) -> Iterator[str]:
    """Names that the code of a module looks up outside of its functions' own variables, in the order of first use."""
    found: dict[str, None] = {}
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"):
            found[instruction.argval] = None
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found |= dict.fromkeys(_names_used(constant))
    yield from found


def _reads_environment(node: ast.expr) -> bool:
    """Whether an expression names `os.environ` or `os.getenv`."""
    names = {getattr(each, "id", getattr(each, "attr", None)) for each in ast.walk(node)}
    return not names.isdisjoint({"environ", "getenv"})


def _is_written(node: ast.expr | None, literal: str | None) -> bool:
    return isinstance(node, ast.Constant) and _literal(node.value) == literal is not None


def _makes_one(node: ast.expr) -> bool:
    """Whether an expression is a call with constants alone, which gives the like of it wherever it is evaluated."""
    given = [*node.args, *(each.value for each in node.keywords)] if isinstance(node, ast.Call) else [node]
    return all(isinstance(each, ast.Constant) for each in given)


def _has_text(value: Any) -> bool:
    """Whether there is something to write for a value: an import, a source or a constant."""
    module = sys.modules.get(getattr(value, "__module__", None) or "")
    code = isinstance(value, ModuleType | FunctionType | type | re.Pattern | functools._lru_cache_wrapper)
    return code or (module is not None and importable(value, module)) or _literal(value) is not None


def _literal(value: Any) -> str | None:
    """A constant as Python writes it, the same in every process; None for what is none."""
    if value is None or type(value) in (bool, int, str, bytes):
        return repr(value)
    if type(value) in (float, complex):
        finite = math.isfinite(value) if type(value) is float else True
        return repr(value) if finite else f"float('{value}')"
    parts: list[str | None]
    if type(value) is dict:
        parts = [part for key, item in value.items() for part in (_literal(key), _literal(item))]
        pairs = zip(parts[::2], parts[1::2], strict=True)
        return None if None in parts else "{" + ", ".join(f"{key}: {item}" for key, item in pairs) + "}"
    if type(value) not in (list, tuple, set, frozenset):
        return None
    parts = [_literal(item) for item in value]
    texts = [part for part in parts if part is not None]
    if len(texts) != len(parts):
        return None
    if isinstance(value, set | frozenset):
        return f"{type(value).__name__}([{', '.join(sorted(texts))}])"
    if isinstance(value, tuple):
        return "(" + "".join(f"{text}, " for text in texts) + ")"
    return f"[{', '.join(texts)}]"
