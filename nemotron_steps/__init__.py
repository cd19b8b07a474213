"""Composable, type-checked post-training steps that share one GRPO engine.

Importing this package does no work: what it offers (docs/python.md) is imported when it is first asked for, and heavy
libraries load only when a step runs.
"""

from __future__ import annotations

import sys

from nemotron_steps.deprecated import MovedModules

TYPE_CHECKING = False  # `typing` takes longer to import than this
if TYPE_CHECKING:
    from typing import Any

    from nemotron_steps.api.artifacts import Artifacts
    from nemotron_steps.api.planned import Planned, plan, run
    from nemotron_steps.api.registry import Registry
    from nemotron_steps.api.result import Result, open_run
    from nemotron_steps.api.training import DPO, GRPO, SFT, evaluate
    from nemotron_steps.errors import StepsError

sys.meta_path.insert(0, MovedModules)  # before a folder that an old module left behind

__version__ = "0.1.0"

_PLACES = {
    "Artifacts": "nemotron_steps.api.artifacts",
    "DPO": "nemotron_steps.api.training",
    "GRPO": "nemotron_steps.api.training",
    "Planned": "nemotron_steps.api.planned",
    "Registry": "nemotron_steps.api.registry",
    "Result": "nemotron_steps.api.result",
    "SFT": "nemotron_steps.api.training",
    "StepsError": "nemotron_steps.errors",
    "evaluate": "nemotron_steps.api.training",
    "open_run": "nemotron_steps.api.result",
    "plan": "nemotron_steps.api.planned",
    "run": "nemotron_steps.api.planned",
}

__all__ = [
    "DPO",
    "GRPO",
    "SFT",
    "Artifacts",
    "Planned",
    "Registry",
    "Result",
    "StepsError",
    "__version__",
    "evaluate",
    "open_run",
    "plan",
    "run",
]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    from importlib import import_module

    return getattr(import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
