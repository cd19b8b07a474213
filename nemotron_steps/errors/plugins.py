"""Importing what another package brings: a config model, an environment, an executor, a validator.

Nothing that a module does while it is imported reaches the command: what it prints goes to stderr, so that `--json`
stays JSON, and what it raises, an exit included, becomes one error that names the module and the line.
"""

from __future__ import annotations

import os
import sys
from contextlib import redirect_stdout, suppress
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from traceback import walk_tb
from typing import TYPE_CHECKING, Any

from nemotron_steps.stopping import stop_if_asked, was_asked
from nemotron_steps.waiting import waiting

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


_METADATA = (".dist-info", ".egg-info")


class PluginImportError(ImportError):
    """What was raised while a module was imported: `name` is the module, `line` the `file:line` that raised."""

    def __init__(self, reference: str, error: BaseException) -> None:
        own = [f"{frame.f_code.co_filename}:{line}" for frame, line in walk_tb(error.__traceback__)]
        self.line = next((each for each in reversed(own) if not each.startswith("<frozen")), None)
        super().__init__(f"{type(error).__name__}: {error}", name=reference.partition(":")[0])


def load_object(reference: str) -> Any:
    """What `module:name` stands for. ModuleNotFoundError where the module itself is not installed, AttributeError where
    it has no such name, PluginImportError where importing it failed in any other way."""
    module_name, _, name = reference.partition(":")
    try:
        with redirect_stdout(sys.stderr), waiting(f"{module_name} to be imported"):
            found: Any = import_module(module_name)
    except (Exception, SystemExit) as error:
        if was_asked():
            raise KeyboardInterrupt from error
        absent = error.name if isinstance(error, ModuleNotFoundError) else None
        if absent is not None and f"{module_name}.".startswith(f"{absent}."):
            raise
        raise PluginImportError(reference, error) from error
    stop_if_asked()
    for part in name.split("."):
        found = getattr(found, part)
    return found


def entry_points(group: str) -> tuple[EntryPoint, ...]:
    """As `importlib.metadata.entry_points(group=…)`, which parses the metadata of every distribution and is itself most
    of a quick command's time: it is asked only where some `entry_points.txt` has the group's name in it."""
    if not _may_have(group):
        return ()
    from importlib import metadata

    return tuple(metadata.entry_points(group=group))


def _may_have(group: str) -> bool:
    """Whether a distribution on sys.path names the group, or is not a plain folder to look into."""
    for finder in sys.meta_path:  # other than Python's own, that know of distributions which are not on sys.path
        named = finder if isinstance(finder, type) else type(finder)
        if hasattr(finder, "find_distributions") and not named.__module__.startswith("_frozen_importlib"):
            return True
    for entry in dict.fromkeys(sys.path):
        try:
            infos = [each.path for each in os.scandir(entry or ".") if each.name.lower().endswith(_METADATA)]
        except FileNotFoundError:
            continue
        except OSError:  # an archive, or a folder that cannot be listed
            return True
        for info in infos:
            with suppress(FileNotFoundError, NotADirectoryError):  # it announces nothing
                if group.encode() in Path(info, "entry_points.txt").read_bytes():
                    return True
    return False


def unusable(reference: str, arguments: int | None = None) -> tuple[str, str] | None:
    """Why `module:name` cannot be used (called with so many `arguments`), and the module or `file:line` that says so;
    None where it may be. The source is read, not imported: what it leaves open is for whoever imports it."""
    module, _, name = reference.partition(":")
    file, missing = _source(module)
    if missing:
        return f"there is no module '{missing}'", module
    try:
        names = names_in(file) if file is not None else None
    except SyntaxError as error:
        return f"{error.msg} (invalid Python)", f"{file}:{error.lineno}"
    except (OSError, ValueError):
        return None
    first = name.partition(".")[0]
    if file is None or names is None:
        return None
    if first in names:
        return _misfit(file, name, arguments) if arguments is not None else None
    submodule = (file.parent / first).is_dir() or (file.parent / f"{first}.py").is_file()
    return None if submodule else (f"{module} has no '{first}'", f"{file}:1")


def _misfit(file: Path, name: str, arguments: int) -> tuple[str, str] | None:
    """Why the function of this name in a module, where it has one definition, cannot be called; and where that is."""
    import ast

    nodes = [n for n in ast.walk(ast.parse(file.read_bytes())) if not isinstance(getattr(n, "ctx", None), ast.Load)]
    found = [n for n in nodes if name in (getattr(n, "name", ""), getattr(n, "asname", ""), getattr(n, "id", ""))]
    node = found[0] if len(found) == 1 else None
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.decorator_list:
        return None
    takes, line = node.args, f"{file}:{node.lineno}"
    if isinstance(node, ast.AsyncFunctionDef):
        return f"'{name}' is a coroutine function, which is called and never awaited", line
    most = len(takes.posonlyargs) + len(takes.args)
    few, many = arguments < most - len(takes.defaults), arguments > most and takes.vararg is None
    says = f"'{name}({ast.unparse(takes)})' is called with {arguments} positional argument(s)"
    return (says, line) if few or many or None in takes.kw_defaults else None


def _source(module: str) -> tuple[Path | None, str]:
    """The file of a module, None where it is not plain source; and the part of its name that there is nothing of."""
    name, spec, path = "", None, None
    for part in module.split("."):
        name = f"{name}.{part}" if name else part
        try:
            spec = find_spec(name) if path is None else PathFinder.find_spec(name, path)
        except (ImportError, ValueError):
            return None, ""
        if spec is None:
            return None, name
        path = list(spec.submodule_search_locations or ())
    origin = spec.origin if spec is not None else None
    return (Path(origin) if origin and origin.endswith(".py") else None), ""


def names_in(file: Path) -> frozenset[str] | None:
    """Every name that a module's source writes: what is not among them it does not have. None where only running it
    tells. The file is read, not run."""
    import ast

    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.alias):
            found.add((node.asname or node.name).partition(".")[0])
        else:
            found.add(str(getattr(node, "id", None) or getattr(node, "name", None)))
    return None if {"*", "__getattr__", "globals", "exec", "setattr"} & found else frozenset(found)
