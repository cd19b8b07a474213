"""Optional packages that a plan's configs ask for, looked up where the plan is about to run and before it starts.

A step that needs Ray or vLLM says so itself when it starts, which in a chain may be hours in. Not for: plans that are
only looked at, or submitted to other machines.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Any

from nemotron_steps.errors import StepsError, UnsupportedError
from nemotron_steps.resolver.plan import Plan
from nemotron_steps.resolver.problems import raise_all

PACKAGES = {"ray": "pip install 'nemotron-steps[ray]'", "vllm": "pip install 'nemotron-steps[vllm]'"}
"""Values of a key `backend` that name an optional package, and how to have it."""


def refuse_missing_packages(plan: Plan) -> None:
    """PlanError, naming every step that is still to run and needs a package that is not installed."""
    problems: list[StepsError] = []
    for planned in plan:
        if planned.cached is not None:
            continue
        for key, backend in _backends(planned.config, ()):
            if backend in PACKAGES and find_spec(backend) is None:
                problems.append(
                    UnsupportedError(
                        f"{planned.key} needs the package {backend}, which is not installed here",
                        where=f"{key}={backend}",
                        hints=(PACKAGES[backend], "steps doctor"),
                    )
                )
    raise_all(problems, "this machine cannot run the plan")


def _backends(config: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Every `backend` key in a config, dotted, and its value."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _backends(value, (*path, name))
        elif name == "backend" and isinstance(value, str):
            yield ".".join((*path, name)), value
