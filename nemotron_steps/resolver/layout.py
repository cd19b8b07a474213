"""Checks of a planned step's layout, and of the nodes and GPUs that it asks for (config/layout).

What is offered was tried: under the override, and the other config, every check here and that of memory passes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from nemotron_steps.config.layout.constraints import (
    Violation,
    causes,
    format_violations,
    pasted,
    suggestion,
    violations,
    with_values,
)
from nemotron_steps.config.layout.model_spec import ModelSpec
from nemotron_steps.config.layout.other_models import teacher_violations, vllm_keys, vllm_violations
from nemotron_steps.config.layout.parallel_config import ParallelConfig
from nemotron_steps.resolver.memory import NODES, PROFILE, beyond_profile, mended_memory, offers, passes
from nemotron_steps.resolver.problems import BatchSizeProblem, LayoutProblem, PlanProblem

if TYPE_CHECKING:
    from nemotron_steps.resolver.checks import CheckSubject

ONE_NODE, ONE_GPU = "one_node", "one_gpu"
"""The configs that a step has for a single node and a single GPU, by convention."""


def layout_fits(subject: CheckSubject) -> Iterator[PlanProblem]:
    """The layout comes out even over the model, the devices and the batch."""
    if "policy" not in subject.config.flat and "cluster" not in subject.config.flat:
        return
    found = _causes(subject)
    if not found:
        return
    sizes = subject.sizes
    wide = sizes.nodes > 1 or sizes.judge_nodes > 0
    smaller = ONE_NODE if wide else ONE_GPU if sizes.gpus_per_node == 1 else None
    offered = smaller is not None and (wide or any(violation.about == "devices" for violation in found))
    hints = _hints(subject, [*_mends(subject), *_config(subject, smaller if offered else None)])
    for about in ("model", "devices", "batch"):
        alike = [violation for violation in found if violation.about == about]
        if alike:
            yield _problem(subject, alike, subject.model, hints)
            hints = []


def _causes(subject: CheckSubject) -> list[Violation]:
    """Misfits of the layout but those that only follow from a cut that a teacher's model has not."""
    if not subject.violations:
        return []
    wrong = {violation.key for violation in subject.violations if violation.about == "model"}
    of_teachers = {violation.key for each in subject.teacher_violations for violation in each.violations}
    return causes(subject.sizes, subject.violations, wrong | of_teachers)


def _problem(
    subject: CheckSubject, alike: list[Violation], model: ModelSpec | None, hints: list[str]
) -> BatchSizeProblem | LayoutProblem:
    """One problem for what is wrong about one thing."""
    kind = BatchSizeProblem if alike[0].about == "batch" else LayoutProblem
    whose = f" cannot train this {model.model_type} model" if alike[0].about == "model" and model is not None else ""
    what, expected, found = format_violations(alike)
    return kind(
        f"{subject.key}{whose}: {what}",
        chain=(subject.key,),
        where=subject.where(alike[0].key),
        expected=expected,
        found=found,
        hints=hints,
    )


def teachers_fit(subject: CheckSubject) -> Iterator[PlanProblem]:
    """The layouts of distillation's teachers come out even over their models. A size of the policy's that its own model
    has not either is told of that."""
    if not subject.teacher_violations:
        return
    of_policy = _causes(subject)
    hints = None if of_policy else _hints(subject, _mends(subject))
    for each in subject.teacher_violations:
        if {violation.key for violation in each.violations} <= {violation.key for violation in of_policy}:
            continue
        what, expected, found = format_violations(each.violations)
        yield LayoutProblem(
            f"{each.who} of {subject.key}: {what}",
            chain=(subject.key,),
            where=subject.where(each.violations[0].key),
            expected=expected,
            found=found,
            hints=hints or (),
        )
        hints = None


def _hints(subject: CheckSubject, offered: list[str]) -> list[str]:
    return offered or [f"steps show {subject.manifest.step.id}   # its configs: no sizes were found that fit here"]


def _mends(subject: CheckSubject) -> list[str]:
    """An override under which everything passes: other sizes, or with these what takes less memory."""
    first = {key: there for key, _, there in beyond_profile(subject) if there > 0}

    def wrong(sizes: ParallelConfig) -> list[Violation]:
        of_teachers = (
            violation for each in teacher_violations(sizes, subject.teacher_models) for violation in each.violations
        )
        return [*violations(sizes, subject.model), *of_teachers]

    more = suggestion(with_values(subject.sizes, first), wrong, offers(subject).get(NODES))
    for hint in [] if more is None else pasted(first | more):
        changed = subject.pasted(hint)
        if passes(changed):
            return [hint]
        short = changed is not None and changed.memory is not None and changed.memory.shortages
        lighter = mended_memory(changed) if changed is not None and short else []
        return [both for each in lighter if passes(subject.pasted(both := _together(hint, each)))]
    return []


def _together(*overrides: str) -> str:
    """Of two values of a key the last."""
    values = dict(word.split("=", 1) for each in overrides for word in each.split(" "))
    return " ".join(f"{key}={value}" for key, value in values.items())


def _config(subject: CheckSubject, name: str | None) -> list[str]:
    """Another config of the step, if everything passes under it."""
    if name is None or name not in subject.manifest.config_names or not passes(subject.configured(name)):
        return []
    return [f"-c {name}"]


def profile_size(subject: CheckSubject) -> Iterator[PlanProblem]:
    """The config asks for no more nodes and GPUs than its profile has."""
    for key, wanted, offered in beyond_profile(subject):
        name = PROFILE[key]
        by, more = f"the profile's {name}", f"set {name} = {wanted} in the profile of env.toml"
        if name in subject.config.job:
            by, more = f"run.env.{name}", f"run.env.{name}={wanted}"
        elif name == "nodes":
            more = 'executor = "slurm" in the profile   # or another that has several nodes'
        yield LayoutProblem(
            f"{subject.key} asks for more than its profile offers",
            chain=(subject.key,),
            where=subject.where(key),
            expected=f"{key} of at most {offered} ({by})",
            found=str(wanted),
            hints=(
                *([f"{key}={offered}"] if _works(subject, key, offered) else _mends(subject)[:1]),
                more,
            ),
        )


def _works(subject: CheckSubject, key: str, value: int) -> bool:
    """Whether with this value of a key neither layout nor memory is refused that is not already."""
    changed = subject.pasted(f"{key}={value}") if value > 0 else None
    if changed is None or (changed.violations and not subject.violations):
        return False
    return not (changed.memory and changed.memory.shortages) or bool(subject.memory and subject.memory.shortages)


def vllm_fits(subject: CheckSubject) -> Iterator[LayoutProblem]:
    """vLLM can cut the models as it is asked to, and sample from them (config/layout/other_models.py)."""
    ports = {key: port.name for port in subject.manifest.consumes for key in port.bindings}
    known = {key: ModelSpec.from_attributes(subject.artifacts.get(name, {})) for key, name in ports.items()}
    models = {key: facts for key, facts in known.items() if facts is not None}
    for each in vllm_violations(models, subject.config.flat.get):
        what, expected, found = format_violations(each.violations)
        named = [f"'{ports[key]}'" for key in each.models]
        yield LayoutProblem(
            f"vLLM cannot generate from {' and '.join(named)} of {subject.key}: {what}",
            chain=tuple(f"{subject.key}.{ports[key]}" for key in each.models[:1]),
            where=subject.where(each.violations[0].key),
            expected=expected,
            found=found,
            hints=each.hints,
        )


def generators_have_gpus(subject: CheckSubject) -> Iterator[LayoutProblem]:
    """A generator without a policy finds its GPUs on one node of its cluster (engine/placement/standalone.py)."""
    keys = vllm_keys("model", subject.config.flat.get)
    gpus = subject.integer("cluster.gpus_per_node")
    if keys is None or not gpus or subject.config.flat.get("cluster.backend") != "ray":
        return
    width = subject.integer(keys.width) or 1
    if width <= gpus:
        return
    smaller = max(size for size in range(1, gpus + 1) if width % size == 0)
    experts = subject.integer(keys.experts) if keys.experts is not None else None
    also = f" {keys.experts}={smaller}" if experts is not None and experts > 1 else ""
    yield LayoutProblem(
        f"{subject.key}: a generator needs more GPUs than a node has",
        chain=(subject.key,),
        where=subject.where(keys.width),
        expected=f"at most {gpus} (cluster.gpus_per_node)",
        found=f"{keys.width}={width}",
        hints=(f"{keys.width}={smaller}{also}", f"cluster.gpus_per_node={width}"),
    )
