"""Importing what another package brings: a config model, an environment, an executor, a validator.

Nothing that a module does while it is imported reaches the command: what it prints goes to stderr, so that `--json`
stays JSON, and what it raises, an exit included, becomes one error that names the module and the line.
"""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from importlib import import_module
from importlib.machinery import all_suffixes
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from nemotron_steps.stopping import stop_if_asked, was_asked
from nemotron_steps.waiting import waiting

if TYPE_CHECKING:
    import ast


class PluginImportError(ImportError):
    """What was raised while a module was imported: `name` is the module, `line` the `file:line` that raised."""

    def __init__(self, reference: str, error: BaseException) -> None:
        self.line = _line(error.__traceback__)
        super().__init__(f"{type(error).__name__}: {error}", name=reference.partition(":")[0])


def load_object(reference: str) -> Any:
    """What `module:name` stands for. ModuleNotFoundError where the module itself is not installed, AttributeError where
    it has no such name, PluginImportError where importing it failed in any other way."""
    module_name, _, name = reference.partition(":")
    try:
        with redirect_stdout(sys.stderr), waiting(f"{module_name} to be imported"):
            found: Any = import_module(module_name)
    except ModuleNotFoundError as error:
        if was_asked():
            raise KeyboardInterrupt from error
        if error.name is not None and f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise PluginImportError(reference, error) from error
    except (Exception, SystemExit) as error:
        if was_asked():
            raise KeyboardInterrupt from error
        raise PluginImportError(reference, error) from error
    stop_if_asked()
    for part in name.split("."):
        found = getattr(found, part)
    return found


def unusable(reference: str, arguments: int | None = None) -> tuple[str, str] | None:
    """Why `module:name` cannot be used, and the module or `file:line` that says so; None where it may be. The source is
    read, and nothing is imported: what the source leaves open is for whoever imports it.

    Args:
        arguments: how many it is called with; None for a class.
    """
    import ast

    module, _, name = reference.partition(":")
    file, missing = _source(module)
    if missing:
        return f"there is no module '{missing}'", module
    try:
        found = bound(file) if file is not None else None
    except SyntaxError as error:
        return f"{error.msg} (invalid Python)", f"{file}:{error.lineno}"
    except (OSError, ValueError):
        return None
    first = name.partition(".")[0]
    if file is None or found is None or first != name:
        return None
    if first not in found:
        submodule = (file.parent / first).is_dir() or (file.parent / f"{first}.py").is_file()
        return None if submodule else (f"{module} has no '{first}'", f"{file}:1")
    node, line = found[first], f"{file}:{getattr(found[first], 'lineno', 1)}"
    if isinstance(node, ast.Constant | ast.List | ast.Dict | ast.Tuple | ast.Set | ast.JoinedStr):
        return f"'{first}' is a value, not a {'class' if arguments is None else 'function'}", line
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return None
    if arguments is None:
        return f"'{first}' is a function, not a class", line
    if isinstance(node, ast.AsyncFunctionDef):
        return f"'{first}' is a coroutine function, which is called and never awaited", line
    takes = node.args
    positional = len(takes.posonlyargs) + len(takes.args)
    least = positional - len(takes.defaults) + sum(default is None for default in takes.kw_defaults)
    fits = least <= arguments and (takes.vararg is not None or arguments <= positional)
    if node.decorator_list or (fits and None not in takes.kw_defaults):
        return None
    return f"'{first}({ast.unparse(takes)})' is called with {arguments} positional argument(s)", line


def _source(module: str) -> tuple[Path | None, str]:
    """The file of a module, None where it is not plain source; and the part of its name that there is nothing of."""
    top, *rest = module.split(".")
    try:
        spec = find_spec(top)
    except (ImportError, ValueError):
        return None, ""
    if spec is None:
        return None, top
    folders = [Path(each) for each in spec.submodule_search_locations or ()]
    file = Path(spec.origin) if spec.has_location and spec.origin else None
    for number, part in enumerate(rest, start=2):
        if not all(folder.is_dir() for folder in folders):  # in an archive
            return None, ""
        beside = [folder / f"{part}{suffix}" for folder in folders for suffix in all_suffixes()]
        inits = [folder / part / "__init__.py" for folder in folders]
        below = [folder / part for folder in folders if (folder / part).is_dir()]
        file = next((each for each in (*inits, *beside) if each.is_file()), None)
        if file is None and not below:
            return None, ".".join(module.split(".")[:number])
        folders = below
    return (file if file is not None and file.suffix == ".py" else None), ""


def bound(file: Path) -> dict[str, ast.AST] | None:
    """What the statements of a module bind: name → its definition, or the value that it gets; None where only running
    them tells. The file is read, not run."""
    import ast

    found: dict[str, ast.AST] = {}
    for node in ast.parse(file.read_bytes()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(each.asname or each.name).partition(".")[0]: node for each in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            value = node.value or node
            found |= {each.id: value for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)}
        elif not isinstance(node, ast.Expr | ast.Pass):  # `if`, `try`, `with`, loops: it depends
            for each in ast.walk(node):
                bound = [each.id] if isinstance(each, ast.Name) else [getattr(each, "name", None) or ""]
                bound += [a.asname or a.name for a in getattr(each, "names", ()) if isinstance(a, ast.alias)]
                found |= dict.fromkeys(bound, node)
        if any(isinstance(each, ast.Name) and each.id in ("globals", "exec", "setattr") for each in ast.walk(node)):
            return None
    return None if {"*", "__getattr__"} & found.keys() else found


def _line(trace: TracebackType | None) -> str | None:
    """The innermost `file:line` of a traceback."""
    found = None
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if not file.startswith("<frozen"):
            found = f"{file}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found
