"""Checks of a planned step's layout, of the nodes and GPUs that it asks for, and of the memory that it takes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from nemotron_steps.config.layout.constraints import Violation, format_violations, hints_of, overrides
from nemotron_steps.config.layout.memory.devices import (
    CAPACITY,
    POLICY,
    TEACHER,
    StepMemory,
    memory_measures,
    step_memory,
)
from nemotron_steps.config.layout.memory.generation import GIB
from nemotron_steps.config.layout.memory.settings import MemorySettings
from nemotron_steps.config.layout.memory.shape import ModelShape
from nemotron_steps.config.layout.model_limits import vllm_keys, vllm_violations
from nemotron_steps.config.layout.model_spec import ModelSpec
from nemotron_steps.config.layout.parallel_config import JUDGES, TEACHERS
from nemotron_steps.resolver.problems import BatchSizeProblem, LayoutProblem, MemoryProblem, PlanProblem

if TYPE_CHECKING:
    from nemotron_steps.resolver.checks import CheckSubject

H200_GIB = 141.0
NODES, GPUS = "cluster.num_nodes", "cluster.gpus_per_node"
PROFILE = {NODES: "nodes", GPUS: "gpus_per_node"}
"""Config key → what a profile calls it."""
SMALLER = {NODES: "one_node", GPUS: "one_gpu"}
"""What a config asks for → the config that a step has for a single one, by convention."""


def layout_fits(subject: CheckSubject) -> Iterator[PlanProblem]:
    """The layout divides the model, the devices and the batch."""
    if "policy" not in subject.config.flat and "cluster" not in subject.config.flat:
        return
    model = f"{subject.key} cannot train this {subject.model.model_type} model" if subject.model else subject.key
    for about, who in (("model", model), ("devices", subject.key), ("batch", subject.key)):
        alike = [violation for violation in subject.violations if violation.about == about]
        if alike:
            yield _problem(BatchSizeProblem if about == "batch" else LayoutProblem, subject, who, alike)


def teachers_fit(subject: CheckSubject) -> Iterator[PlanProblem]:
    """The layouts of distillation's teachers divide their models. A size of the policy's that its own model has not
    either is reported with that."""
    of_policy = {violation.key for violation in subject.violations}
    for each in subject.teacher_violations:
        if not {violation.key for violation in each.violations} <= of_policy:
            yield _problem(LayoutProblem, subject, f"{each.teachers} of {subject.key}", each.violations)


def _problem(
    kind: type[PlanProblem], subject: CheckSubject, who: str, alike: Sequence[Violation], port: str | None = None
) -> PlanProblem:
    what, expected, found = format_violations(alike)
    show = f"steps show {subject.manifest.step.id}   # its configs, and the GPUs that each is for"
    said = {"expected": expected, "found": found, "hints": hints_of(alike) or (show,)}
    return subject.problem(kind, f"{who}: {what}", port, alike[0].key, **said)


def profile_size(subject: CheckSubject) -> Iterator[PlanProblem]:
    """The config asks for no more nodes and GPUs than its profile has."""
    for key, offered in offers(subject).items():
        wanted = subject.integer(key)
        if wanted is None or wanted <= offered:
            continue
        name = PROFILE[key]
        by, more = f"the profile's {name}", f"set {name} = {wanted} in the profile of env.toml"
        if name in subject.config.job:
            by, more = f"run.env.{name}", f"run.env.{name}={wanted}"
        elif name == "nodes":
            more = 'executor = "slurm" in the profile   # or another that has several nodes'
        smaller = [SMALLER[key]] if offered == 1 and SMALLER[key] in subject.manifest.config_names else []
        hints = [*(f"-c {config}" for config in smaller), *([f"{key}={offered}"] if offered > 0 else []), more]
        what, expected = f"{subject.key} asks for more than its profile offers", f"{key} of at most {offered} ({by})"
        yield subject.problem(LayoutProblem, what, None, key, expected=expected, found=str(wanted), hints=hints)


def vllm_fits(subject: CheckSubject) -> Iterator[PlanProblem]:
    """vLLM can cut the models as it is asked to, and sample from them (config/layout/model_limits.py)."""
    known = {key: ModelSpec.from_attributes(subject.recorded(name)) for key, name in subject.ports.items()}
    models = {key: spec for key, spec in known.items() if spec is not None}
    for each in vllm_violations(models, subject.config.flat.get):
        ports = [subject.ports[key] for key in each.models]
        named = " and ".join(f"'{port}'" for port in ports)
        who = f"vLLM cannot generate from {named} of {subject.key}"
        yield _problem(LayoutProblem, subject, who, each.violations, ports[0])


def generators_have_gpus(subject: CheckSubject) -> Iterator[PlanProblem]:
    """A generator without a policy finds its GPUs on one node of its cluster (engine/placement/run.py)."""
    keys = vllm_keys("model", subject.config.flat.get)
    gpus = subject.integer("cluster.gpus_per_node")
    if keys is None or not gpus or subject.config.flat.get("cluster.backend") != "ray":
        return
    width = subject.integer(keys.width) or 1
    if width <= gpus:
        return
    smaller = math.gcd(width, gpus)
    experts = subject.integer(keys.experts or "") or 1
    also = f" {keys.experts}={smaller}" if experts > 1 else ""
    hints = (f"{keys.width}={smaller}{also}", f"cluster.gpus_per_node={width}")
    said = {"expected": f"at most {gpus} (cluster.gpus_per_node)", "found": f"{keys.width}={width}", "hints": hints}
    yield subject.problem(
        LayoutProblem, f"{subject.key}: a generator needs more GPUs than a node has", None, keys.width, **said
    )


def memory_of(subject: CheckSubject) -> StepMemory | None:
    """Of a training step whose layout comes out even; None for any other."""
    if not ("policy" in subject.config.flat and "cluster" in subject.config.flat) or subject.violations:
        return None
    return step_memory(MemorySettings.read(subject.get, subject.sizes), partial(_shape, subject))


def memory_fits(subject: CheckSubject) -> Iterator[PlanProblem]:
    """Every GPU has the memory that the parts on it take."""
    memory = subject.memory
    if memory is None or not memory.shortages:
        return
    shape_of = partial(_shape, subject)
    measures = memory_measures(subject.get, shape_of, subject.model, offers(subject).get(NODES))
    hints = overrides(measures)
    larger = MemorySettings.read(lambda key: H200_GIB if key == CAPACITY else subject.get(key))
    if not step_memory(larger, shape_of).shortages:
        hints += (f"{CAPACITY}={H200_GIB:.0f}   # where the GPUs have it, as an H200",)
    if not hints or subject.config.sizes.backend != "ray":
        hints += (f"steps show {subject.manifest.step.id}   # its configs, and the GPUs that each is for",)
    for shortage in memory.shortages:
        most = sorted(shortage.lines.items(), key=lambda item: -item[1])[:4]
        parts = [f"{role}'s {line} {count / GIB:.1f}" for (role, line), count in most]
        yield subject.problem(
            MemoryProblem,
            f"{subject.key}: {shortage.what}",
            None,
            shortage.key,
            expected=f"at most {shortage.there / GIB:.1f} GiB ({shortage.key})",
            found=f"{shortage.needed / GIB:.1f} GiB: {', '.join(parts)}",
            hints=hints,
        )
        hints = ()


def _shape(subject: CheckSubject, role: str) -> ModelShape | None:
    """Of the model that plays a role, from what is recorded of it."""
    key = "policy.checkpoint" if role == POLICY else f"{JUDGES}.{role}.responses_api_models.vllm_model.model"
    if role.startswith(f"{TEACHER} "):
        key = f"{TEACHERS}.{role.removeprefix(f'{TEACHER} ')}"
    if key not in subject.ports:
        return None
    return ModelShape.read(subject.recorded(subject.ports[key]).get("shape", {}))


def offers(subject: CheckSubject) -> dict[str, int]:
    """Config key → the most that its profile has of it, where that is said."""
    found = {key: subject.profile.get(name) for key, name in PROFILE.items()}
    return {key: offered for key, offered in found.items() if type(offered) is int}
