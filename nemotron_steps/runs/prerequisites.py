"""What a step would refuse when it starts, asked where the plan is about to run and before its first step does.

Steps without an implementation, optional packages (Ray, vLLM) that the configs ask for, and the data that a step's own
preflight looks at: in a chain the step itself may come hours later. Not for plans that are only looked at; one that is
submitted to other machines is asked for its implementations alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Any

from nemotron_steps.artifacts.models import Artifact
from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.errors import StepsError, UnsupportedError
from nemotron_steps.manifest.packs import BUILT_IN
from nemotron_steps.manifest.typegraph import TypeGraph
from nemotron_steps.resolver.plan import Plan, PlannedStep, SuppliedInput
from nemotron_steps.resolver.problems import raise_all
from nemotron_steps.runs.code_digest import import_closure
from nemotron_steps.runs.depends import entry_module
from nemotron_steps.runs.inputs import name_users_files, open_input
from nemotron_steps.runs.step_entry import ENGINE, imported, validated_config

PACKAGES = {"ray": "pip install 'nemotron-steps[ray]'", "vllm": "pip install 'nemotron-steps[vllm]'"}
"""Values of a key `backend` that name an optional package, and how to have it."""

_TORCH = re.compile(r"^(?:import|from)[ \t]+torch\b", re.MULTILINE)

WITHOUT = {"ray": "process", "vllm": "embedded"}
"""What to set such a key to instead."""


def refuse_unimplemented(plan: Plan) -> None:
    """PlanError, naming every step that is still to run and whose manifest names no code."""
    problems: list[StepsError] = []
    for planned in plan:
        if planned.cached is None:
            try:
                entry_module(planned)
            except UnsupportedError as error:
                problems.append(error)
    raise_all(problems, "the plan cannot be run")


def refuse_unimportable(plan: Plan) -> None:
    """PlanError, naming every step of other packs that is still to run and whose function cannot be imported."""
    problems: list[StepsError] = []
    for planned in plan:
        entry = planned.manifest.step.entry
        if planned.cached is None and entry is not None and planned.manifest.pack != BUILT_IN:
            try:
                if not callable(found := imported(entry, planned)):
                    where = planned.manifest.where("step", "entry")
                    what = f"entry of step '{planned.step_id}' is not a function"
                    problems.append(UnsupportedError(what, where=where, expected=entry, found=repr(found)[:80]))
            except UnsupportedError as error:
                problems.append(error)
    raise_all(problems, "the run cannot start")


def refuse_missing_packages(plan: Plan) -> None:
    """PlanError, naming every step that is still to run and needs a package that is not installed."""
    problems: list[StepsError] = []
    without_engine = find_spec("torch") is None
    for planned in plan:
        if planned.cached is not None:
            continue
        if without_engine and _needs_engine(planned):
            problems.append(
                UnsupportedError(
                    f"{planned.key} trains or generates, and the engine is not installed here",
                    where=planned.manifest.where("step", "entry"),
                    expected="torch, transformers, megatron-core",
                    hints=(ENGINE,),
                )
            )
            continue
        for key, backend in _backends(planned.config, ()):
            if backend in PACKAGES and find_spec(backend) is None:
                hints = [PACKAGES[backend], f"{key}={WITHOUT[backend]}   # does without", "steps doctor"]
                problems.append(
                    UnsupportedError(
                        f"{planned.key} needs the package {backend}, which is not installed here",
                        where=f"{key}={backend}",
                        hints=hints,
                    )
                )
    raise_all(problems, "this machine cannot run the plan")


def refuse_unusable_data(plan: Plan, store: ArtifactStore, types: TypeGraph) -> None:
    """PlanError, naming every step that is still to run and whose preflight refuses what it was given."""
    problems: list[StepsError] = []
    for planned in plan:
        reference = planned.manifest.step.preflight
        if planned.cached is not None or reference is None:
            continue
        opened: dict[str, Artifact] = {}
        try:
            there = {
                port: open_input(planned, port, source, store, types=types)
                for port, source in planned.inputs.items()
                if isinstance(source, SuppliedInput)
            }
            opened |= {port: artifact for port, artifact in there.items() if artifact is not None}
            check = imported(reference, planned)
            check(validated_config(planned, opened), {**dict.fromkeys(planned.inputs), **opened})
        except StepsError as error:
            problems.append(name_users_files(error, opened.values()))
    raise_all(problems, "the run cannot start")


def _needs_engine(planned: PlannedStep) -> bool:
    """Whether the step's code, or a module that it imports, imports torch."""
    closure = import_closure(entry_module(planned))
    return any(_TORCH.search(path.read_text("utf-8")) for path in closure.values())


def _backends(config: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Every `backend` key in a config, dotted, and its value."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _backends(value, (*path, name))
        elif name == "backend" and isinstance(value, str):
            yield ".".join((*path, name)), value
