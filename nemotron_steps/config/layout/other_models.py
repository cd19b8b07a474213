"""Whether models that a step does not train fit how they are loaded: teachers of distillation, whose layout is the
policy's or their own, and what vLLM generates from: an evaluated or sampled model, judges.

What a policy's own generator cannot do is among its layout's violations (constraints.py).
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from nemotron_steps.config.layout.constraints import Violation, model_violations, raise_if_violated
from nemotron_steps.config.layout.model_spec import ModelSpec
from nemotron_steps.config.layout.parallel_config import (
    JUDGE_ROLES,
    JUDGES,
    KEYS,
    MEGATRON,
    ParallelConfig,
    teachers_named,
)

_CUTS = ("tensor", "pipeline", "context", "expert", "sequence_parallel")


@dataclass(frozen=True)
class VllmKeys:
    """Where a config says how vLLM generates."""

    backend: str
    width: str
    experts: str | None = None


@dataclass(frozen=True)
class ModelViolations:
    """What one layout violates of one model, or of several that share it.

    Attributes:
        models: names of the teachers, or keys of the models.
        violations: under the config's own keys.
    """

    models: tuple[str, ...]
    violations: tuple[Violation, ...]

    @property
    def teachers(self) -> str:
        """The teachers, in words."""
        return teachers_named(self.models)


def teacher_violations(sizes: ParallelConfig, models: Mapping[str, ModelSpec]) -> Iterator[ModelViolations]:
    """Teachers whose models their layouts do not fit, by the name of each whose model is known. What is wrong with a
    layout is reported once for all teachers."""
    alike: dict[frozenset[str], dict[str, list[Violation]]] = {}
    for name, model in models.items():
        own = next((teacher for teacher in sizes.teachers if teacher.name == name), None)
        cuts = {cut: getattr(own or sizes, cut) for cut in _CUTS}
        layout = ParallelConfig(**cuts, gpus_per_node=(own and own.gpus_per_node) or sizes.gpus_per_node)
        named = {} if own is None else {key: key.replace(MEGATRON, own.section) for key in KEYS.values()}
        found = [_under(each, named) for each in model_violations(layout, model)]
        if found:
            alike.setdefault(frozenset(violation.key for violation in found), {})[name] = found
    for teachers in alike.values():
        yield ModelViolations(tuple(teachers), tuple(each for found in teachers.values() for each in found))


def raise_if_teachers_violate(sizes: ParallelConfig, models: Mapping[str, ModelSpec]) -> None:
    """ConfigError for the first layout that does not fit a teacher."""
    for each in teacher_violations(sizes, models):
        raise_if_violated(each.violations, f"{each.teachers}: ")


def vllm_keys(model_key: str, get: Callable[[str], Any]) -> VllmKeys | None:
    """Settings of the vLLM that generates from the model which a config key names; None where something else does, or a
    policy's generator."""
    section, _, name = model_key.rpartition(".")
    if model_key.partition(".")[0] in ("model", "models"):
        cfg = "generation.vllm_cfg"
        keys = VllmKeys("generation.backend", f"{cfg}.tensor_parallel_size", f"{cfg}.expert_parallel_size")
    elif name == "model" and section in (f"{JUDGES}.{role}.responses_api_models.vllm_model" for role in JUDGE_ROLES):
        keys = VllmKeys(f"{section}.backend", f"{section}.tensor_parallel_size")
    else:
        return None
    return keys if get(keys.backend) == "vllm" else None


def vllm_violations(models: Mapping[str, ModelSpec], get: Callable[[str], Any]) -> Iterator[ModelViolations]:
    """What vLLM cannot do with models, each under the config key that names it; once for all that share settings."""
    found: dict[VllmKeys, dict[str, list[Violation]]] = {}
    for model_key, model in models.items():
        keys = vllm_keys(model_key, get)
        if keys is None:
            continue
        width, experts = (get(key) if key else None for key in (keys.width, keys.experts))
        sizes = ParallelConfig(
            uses_vllm=True,
            generator_width=width if type(width) is int and width > 0 else 1,
            generator_experts=experts if type(experts) is int and experts > 0 else 1,
        )
        own = {"uses_vllm": keys.backend, "generator_width": keys.width, "generator_experts": keys.experts or ""}
        named = {KEYS[field]: key for field, key in own.items()}
        wrong = [_under(each, named) for each in model_violations(sizes, model)]
        if wrong:
            found.setdefault(keys, {})[model_key] = wrong
    for alike in found.values():
        together = dict.fromkeys(each for wrong in alike.values() for each in wrong)
        yield ModelViolations(tuple(alike), tuple(together))


def raise_if_vllm_violates(models: Mapping[str, ModelSpec], get: Callable[[str], Any]) -> None:
    """ConfigError for the first of `vllm_violations`."""
    for each in vllm_violations(models, get):
        raise_if_violated(each.violations)


def _under(violation: Violation, keys: Mapping[str, str]) -> Violation:
    """The same under other config keys."""
    hint = {keys.get(key, key): value for key, value in violation.hint.items()}
    return replace(violation, key=keys.get(violation.key, violation.key), hint=hint)
