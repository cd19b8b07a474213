"""Whether the layouts of distillation's teachers fit their models: the policy's layout, or one of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nemotron_steps.config.layout.constraints import (
    Violation,
    device_violations,
    format_violations,
    model_violations,
    pasted,
    suggestion,
)
from nemotron_steps.config.layout.model_spec import ModelSpec
from nemotron_steps.config.layout.parallel_config import (
    JUDGE_ROLES,
    JUDGES,
    KEYS,
    MEGATRON,
    ParallelConfig,
    TeacherLayout,
    teachers_named,
)
from nemotron_steps.errors import ConfigError

_CUTS = ("tensor", "pipeline", "context", "expert", "sequence_parallel")


@dataclass(frozen=True)
class TeacherViolation:
    """What is wrong with one layout, for one teacher or for several of which it is.

    Attributes:
        names: of these teachers.
        violations: under the config keys of the layout.
    """

    names: tuple[str, ...]
    violations: tuple[Violation, ...]

    @property
    def who(self) -> str:
        """The teachers, in words."""
        return teachers_named(self.names)


def teachers_fit(sizes: ParallelConfig, models: Mapping[str, ModelSpec]) -> bool:
    """Whether every teacher's layout fits its model.

    Args:
        sizes: of the run.
        models: teacher → facts of its model, where that is known.
    """
    return not any(_found(_own(sizes, name), model, sizes.gpus_per_node) for name, model in models.items())


def teacher_violations(sizes: ParallelConfig, models: Mapping[str, ModelSpec]) -> Iterator[TeacherViolation]:
    """Teachers whose models their layouts do not fit; arguments as `teachers_fit`'s. What is wrong with a layout is
    told once for all teachers."""
    alike: dict[frozenset[str], dict[str, list[Violation]]] = {}
    for name, model in models.items():
        if found := _found(_own(sizes, name), model, sizes.gpus_per_node):
            alike.setdefault(frozenset(violation.key for violation in found), {})[name] = found
    for teachers in alike.values():
        together = tuple(violation for found in teachers.values() for violation in found)
        yield TeacherViolation(tuple(teachers), together)


def _own(sizes: ParallelConfig, name: str) -> TeacherLayout | ParallelConfig:
    return next((teacher for teacher in sizes.teachers if teacher.name == name), sizes)


def _found(own: TeacherLayout | ParallelConfig, model: ModelSpec, node: int) -> list[Violation]:
    """What of a layout is the teacher's, under its own keys."""
    layout = ParallelConfig(**{name: getattr(own, name) for name in _CUTS}, gpus_per_node=node)

    def named(key: str) -> str:
        return key.replace(MEGATRON, own.section if isinstance(own, TeacherLayout) else MEGATRON)

    return [
        replace(
            each, key=named(each.key), mends=[{named(key): each for key, each in mend.items()} for mend in each.mends]
        )
        for each in model_violations(layout, model)
    ]


def wrong_for(sizes: ParallelConfig, models: Mapping[str, ModelSpec]) -> list[Violation]:
    """Everything that is wrong with teachers' layouts, for their models or for the devices."""
    return [
        *(violation for each in teacher_violations(sizes, models) for violation in each.violations),
        *device_violations(sizes),
    ]


def raise_if_teachers_violate(sizes: ParallelConfig, models: Mapping[str, ModelSpec]) -> None:
    """ConfigError for the first layout that does not fit a teacher."""
    for each in teacher_violations(sizes, models):
        what, expected, found = format_violations(each.violations)
        raise ConfigError(
            f"{each.who}: {what}",
            where=each.violations[0].key,
            expected=expected,
            found=found,
            hints=pasted(suggestion(sizes, lambda after: wrong_for(after, models))),
        )


SAMPLED = ("model", "models")
"""Keys of the models that a step samples from which trains none; the second is of several, each under a name."""
_GENERATION = "generation"


@dataclass(frozen=True)
class VllmKeys:
    """Where a config says how vLLM generates."""

    backend: str
    width: str
    experts: str | None = None

    @property
    def written(self) -> Mapping[str, str]:
        """Keys of a policy's generator → those that stand for them here."""
        own = {"uses_vllm": self.backend, "generator_width": self.width, "generator_experts": self.experts}
        return {KEYS[field]: key for field, key in own.items() if key is not None}


@dataclass(frozen=True)
class VllmViolation:
    """What vLLM cannot do with some models that share its settings.

    Attributes:
        models: their keys.
        violations: under the config's own keys.
        hints: overrides, each of which mends all of them.
    """

    models: tuple[str, ...]
    violations: tuple[Violation, ...]
    hints: tuple[str, ...]


def vllm_keys(model_key: str, get: Callable[[str], Any]) -> VllmKeys | None:
    """Settings of the vLLM that generates from a model; None where something else does, or a policy's generator.

    Args:
        model_key: the config key that names the model.
        get: dotted key → value of the config, or None.
    """
    for role in JUDGE_ROLES:
        section = f"{JUDGES}.{role}.responses_api_models.vllm_model"
        if model_key == f"{section}.model":
            keys = VllmKeys(f"{section}.backend", f"{section}.tensor_parallel_size")
            break
    else:
        if model_key.partition(".")[0] not in SAMPLED:
            return None
        cfg = f"{_GENERATION}.vllm_cfg"
        keys = VllmKeys(f"{_GENERATION}.backend", f"{cfg}.tensor_parallel_size", f"{cfg}.expert_parallel_size")
    return keys if get(keys.backend) == "vllm" else None


def vllm_violations(models: Mapping[str, ModelSpec], get: Callable[[str], Any]) -> Iterator[VllmViolation]:
    """What vLLM cannot do with models, told once for all that it treats alike.

    Args:
        models: config key that names it → the model.
        get: see vllm_keys.
    """
    sharing: dict[VllmKeys, dict[str, ModelSpec]] = {}
    for model_key, model in models.items():
        keys = vllm_keys(model_key, get)
        if keys is not None:
            sharing.setdefault(keys, {})[model_key] = model
    for keys, alike in sharing.items():
        found = {model_key: _violations(_sizes(keys, get), model, keys) for model_key, model in alike.items()}
        wrong = tuple(model_key for model_key, each in found.items() if each)
        if wrong:
            together = dict.fromkeys(violation for each in found.values() for violation in each)
            yield VllmViolation(wrong, tuple(together), tuple(_mends(keys, get, [*alike.values()])))


def raise_if_vllm_violates(models: Mapping[str, ModelSpec], get: Callable[[str], Any]) -> None:
    """ConfigError for the first of `vllm_violations`."""
    for each in vllm_violations(models, get):
        what, expected, found = format_violations(each.violations)
        raise ConfigError(what, where=each.violations[0].key, expected=expected, found=found, hints=each.hints)


def _sizes(keys: VllmKeys, get: Callable[[str], Any]) -> ParallelConfig:
    def count(key: str | None) -> int:
        value = get(key) if key is not None else None
        return value if type(value) is int and value > 0 else 1

    return ParallelConfig(uses_vllm=True, generator_width=count(keys.width), generator_experts=count(keys.experts))


def _violations(sizes: ParallelConfig, model: ModelSpec, keys: VllmKeys) -> list[Violation]:
    return [replace(each, key=keys.written.get(each.key, each.key)) for each in model_violations(sizes, model)]


def _mends(keys: VllmKeys, get: Callable[[str], Any], models: Sequence[ModelSpec]) -> Iterator[str]:
    """The next smaller width that fits every model, and doing without vLLM where it samples from another model."""
    sizes = _sizes(keys, get)
    divisors = (width for width in range(sizes.generator_width, 0, -1) if sizes.generator_width % width == 0)
    for width in divisors:
        experts = width if sizes.generator_experts > 1 else 1
        smaller = replace(sizes, generator_width=width, generator_experts=experts)
        if not any(_violations(smaller, model, keys) for model in models):
            of_experts = f" {keys.experts}={experts}" if experts != sizes.generator_experts else ""
            yield f"{keys.width}={width}{of_experts}"
            return
    yield f"{keys.backend}=embedded {keys.width}=1" if sizes.generator_width > 1 else f"{keys.backend}=embedded"
