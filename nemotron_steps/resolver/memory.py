"""The memory that a planned step takes (config/layout/memory), of the models that are known by now."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from nemotron_steps.config.layout.constraints import overrides
from nemotron_steps.config.layout.memory.devices import (
    CAPACITY,
    POLICY,
    TEACHER,
    Lines,
    StepMemory,
    memory_measures,
    step_memory,
)
from nemotron_steps.config.layout.memory.generation import GIB
from nemotron_steps.config.layout.memory.settings import MemorySettings
from nemotron_steps.config.layout.memory.shape import ModelShape
from nemotron_steps.config.layout.parallel_config import JUDGES, TEACHERS
from nemotron_steps.resolver.problems import MemoryProblem

if TYPE_CHECKING:
    from nemotron_steps.resolver.checks import CheckSubject
    from nemotron_steps.resolver.request import StepConfig

H200_GIB = 141.0
NODES, GPUS = "cluster.num_nodes", "cluster.gpus_per_node"
PROFILE = {NODES: "nodes", GPUS: "gpus_per_node"}
"""Config key → what a profile calls it."""


def trains(config: StepConfig) -> bool:
    """Whether a config has what memory is predicted from."""
    return "policy" in config.flat and "cluster" in config.flat


def memory_of(subject: CheckSubject) -> StepMemory | None:
    """Of a training step whose layout comes out even; None for any other."""
    config = subject.config
    if not trains(config) or subject.violations:
        return None
    return step_memory(MemorySettings.read(subject.get, subject.sizes), lambda role: _shape(subject, role))


def memory_fits(subject: CheckSubject) -> Iterator[MemoryProblem]:
    """Every GPU has the memory that the parts on it take."""
    memory = subject.memory
    if memory is None or not memory.shortages:
        return

    def shape_of(role: str) -> ModelShape | None:
        return _shape(subject, role)

    measures = memory_measures(subject.get, shape_of, subject.model, offers(subject).get(NODES))
    hints = overrides(measures)
    larger = MemorySettings.read(lambda key: H200_GIB if key == CAPACITY else subject.get(key))
    if not step_memory(larger, shape_of).shortages:
        hints += (f"{CAPACITY}={H200_GIB:.0f}   # where the GPUs have it, as an H200",)
    if not hints or subject.config.sizes.backend != "ray":
        hints += (f"steps show {subject.manifest.step.id}   # its configs, and the GPUs that each is for",)
    for shortage in memory.shortages:
        yield MemoryProblem(
            f"{subject.key}: {shortage.what}",
            chain=(subject.key,),
            where=subject.where(shortage.key),
            expected=f"at most {gib(shortage.there)} GiB ({shortage.key})",
            found=f"{gib(shortage.needed)} GiB: {largest(shortage.lines)}",
            hints=hints,
        )
        hints = ()


def gib(count: float) -> str:
    """Bytes as GiB, with as many digits as a prediction has."""
    return f"{count / GIB:.1f}"


def largest(lines: Lines, most: int = 4) -> str:
    """What takes most, in words."""
    ordered = sorted(lines.items(), key=lambda item: -item[1])[:most]
    return ", ".join(f"{role}'s {line} {gib(count)}" for (role, line), count in ordered)


def _shape(subject: CheckSubject, role: str) -> ModelShape | None:
    """Of the model that plays a role, from what is recorded of it."""
    key = "policy.checkpoint" if role == POLICY else f"{JUDGES}.{role}.responses_api_models.vllm_model.model"
    if role.startswith(f"{TEACHER} "):
        key = f"{TEACHERS}.{role.removeprefix(f'{TEACHER} ')}"
    for port in subject.manifest.consumes:
        if key in port.bindings:
            return ModelShape.read(subject.artifacts.get(port.name, {}).get("shape", {}))
    return None


def beyond_profile(subject: CheckSubject) -> Iterator[tuple[str, int, int]]:
    """Config key, what it asks for and what the profile has, where that is less."""
    for key, offered in offers(subject).items():
        wanted = subject.integer(key)
        if wanted is not None and wanted > offered:
            yield key, wanted, offered


def offers(subject: CheckSubject) -> dict[str, int]:
    """Config key → the most that its profile has of it, where that is said."""
    found = {key: subject.profile.get(name) for key, name in PROFILE.items()}
    return {key: offered for key, offered in found.items() if type(offered) is int}
