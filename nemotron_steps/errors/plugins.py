"""Importing what another package brings: a config model, an environment, an executor, a validator.

Nothing that a module does while it is imported reaches the command: what it prints goes to stderr, so that `--json`
stays JSON, and what it raises, an exit included, becomes one error that names the module and the line.
"""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from importlib import import_module
from types import TracebackType
from typing import Any

from nemotron_steps.stopping import stop_if_asked, was_asked
from nemotron_steps.waiting import waiting


class PluginImportError(ImportError):
    """What was raised while a module was imported: `name` is the module, `line` the `file:line` that raised."""

    def __init__(self, reference: str, error: BaseException) -> None:
        self.line = _line(error.__traceback__)
        super().__init__(f"{type(error).__name__}: {error}", name=reference.partition(":")[0])


def load_object(reference: str) -> Any:
    """What `module:name` stands for.

    Raises:
        ModuleNotFoundError: the module itself is not installed.
        AttributeError: it has no such name.
        PluginImportError: importing it failed in any other way.
        KeyboardInterrupt: as it was, or where one became something else.
    """
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


def _line(trace: TracebackType | None) -> str | None:
    """The innermost `file:line` of a traceback."""
    found = None
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if not file.startswith("<frozen"):
            found = f"{file}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found
