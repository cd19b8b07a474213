"""Old names that others may import, kept for one minor version: each warns, and gives what it is called now."""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # `typing` takes longer to import than this
if TYPE_CHECKING:
    from collections.abc import Callable
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

MOVED: dict[str, str] = {
    "api.grpo": "api.training",
    "api.running": "api.planned",
    "engine.native": "engine.kernels",
    "config.mirrors": "config.profiles",
    "config.schema.difficulty": "config.schema.eval",
    "config.schema.genrm": "config.schema.sft",
    "config.schema.sft_packing": "config.schema.sft",
    "runs.tracker": "runs.context",
    "environments.judged.notes": "environments.judged.judge_transcripts",
    "environments.remote.json_http": "environments.http_client",
    "environments.agents": "environments.registry",
}
"""Old module → new module, below nemotron_steps."""


class MovedModules:
    """Finds modules under their old names."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """The spec of a module that has moved."""
        package, _, old = name.partition(".")
        if package != __package__ or old not in MOVED:
            return None
        from importlib.machinery import ModuleSpec

        return ModuleSpec(name, _Loader())  # type: ignore[arg-type]


class _Loader:
    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        from importlib import import_module

        old = module.__name__
        new = f"{__package__}.{MOVED[old.partition('.')[2]]}"
        _warn(old, new)
        sys.modules[old] = import_module(new)


def renamed(module: str, names: dict[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of a module (its `__name__`) some of whose names have changed: old name → new name."""

    def __getattr__(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module '{module}' has no attribute '{name}'")
        _warn(f"{module}.{name}", f"{module}.{names[name]}")
        return getattr(sys.modules[module], names[name])

    return __getattr__


def _warn(old: str, new: str) -> None:
    import warnings

    warnings.warn(f"{old} is now {new}; the old name goes with the next minor version", DeprecationWarning, 4)
