"""A reward function of this process → the name that a run knows it by, in every process and when it is resumed.

A function of an installed or importable package is `MODULE:NAME`, one of a file beside the program `FILE.py:NAME`. One
that no import reaches (of a notebook, of the program that is running, a lambda) is written down with what it uses
(`source_text`), in the home under the digest of its text (docs/decisions/rewards-from-notebooks.md).
"""

from __future__ import annotations

import hashlib
import inspect
import os
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from nemotron_steps.api.source_text import importable, root_of, written_down
from nemotron_steps.artifacts.files import write_atomic
from nemotron_steps.errors import ConfigError

Reward = str | Callable[..., Any]


def function_reference(function: Reward, folder: Path, position: int = 0) -> str:
    """`FILE.py:NAME` or `MODULE:NAME` of a reward function.

    Args:
        function: a function, or such a text, as it is.
        folder: gets the file of a function that has to be written down.
        position: among the rewards; it names a lambda.

    Raises ConfigError for what is no function, or cannot be written down.
    """
    if isinstance(function, str):
        return function
    if not isinstance(function, FunctionType):
        raise ConfigError(
            "a reward is a function: what holds a state of its own cannot be taken to another process",
            where=f"rewards[{position}]",
            expected="def NAME(prompts, completions, **columns), or 'FILE.py:NAME'",
            found=_described(function),
            hints=(f"def reward(completions, **columns): return {_described(function)}(...)",),
        )
    module = sys.modules.get(function.__module__)
    if module is not None and importable(function, module):
        file = Path(inspect.getsourcefile(module) or "").absolute()
        if "." not in module.__name__ and not hasattr(module, "__path__"):
            return f"{file}:{function.__qualname__}"
        _refuse_unreachable(module, position)
        return f"{module.__name__}:{function.__qualname__}"
    name = function.__name__ if function.__name__.isidentifier() else f"reward_{position}"
    text = written_down(function, name)
    file = folder / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}.py"
    if not file.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(file, text.encode())
    return f"{file.absolute()}:{name}"


def _refuse_unreachable(module: ModuleType, position: int) -> None:
    """ConfigError for a package that this process found through a path that a fresh one does not have."""
    root = root_of(module)
    known = [os.getcwd(), *sysconfig.get_paths().values(), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    known += [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    top = sys.modules.get(module.__name__.partition(".")[0])
    editable = type(getattr(getattr(top, "__spec__", None), "loader", None)).__module__.startswith("__editable__")
    if editable or root in {str(Path(path).absolute()) for path in known if path} or _in_pth(root):
        return
    raise ConfigError(
        f"the reward function's package {module.__name__} is not to be found by the processes that call it",
        where=f"rewards[{position}]",
        expected="an installed package, one of the working directory, or one on PYTHONPATH",
        found=root,
        hints=(f"export PYTHONPATH={root}   # before this program starts", f"pip install -e {root}"),
    )


def _in_pth(root: str) -> bool:
    """Whether a `.pth` file of the environment names the folder, as for packages installed with `pip install -e`."""
    folders = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    return any(
        root in file.read_text(encoding="utf-8", errors="replace").splitlines()
        for folder in folders
        for file in Path(folder).glob("*.pth")
    )


def _described(function: Any) -> str:
    name = getattr(function, "__name__", None)
    return str(name) if isinstance(name, str) and not isinstance(function, type) else type(function).__name__
