"""Whether vLLM can generate from models that no policy of the step trains: an evaluated or sampled one, judges.

What a policy's own generator cannot do is among its layout's misfits (misfits.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nemotron_steps.config.layout.facts import ModelFacts
from nemotron_steps.config.layout.misfits import Misfit, model_misfits, told
from nemotron_steps.config.layout.sizes import JUDGE_ROLES, JUDGES, KEYS, LayoutSizes
from nemotron_steps.errors import ConfigError

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
class VllmMisfit:
    """What vLLM cannot do with some models that share its settings.

    Attributes:
        models: their keys.
        misfits: under the config's own keys.
        hints: overrides, each of which mends all of them.
    """

    models: tuple[str, ...]
    misfits: tuple[Misfit, ...]
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


def vllm_misfits(models: Mapping[str, ModelFacts], get: Callable[[str], Any]) -> Iterator[VllmMisfit]:
    """What vLLM cannot do with models, told once for all that it treats alike.

    Args:
        models: config key that names it → the model.
        get: see vllm_keys.
    """
    sharing: dict[VllmKeys, dict[str, ModelFacts]] = {}
    for model_key, model in models.items():
        keys = vllm_keys(model_key, get)
        if keys is not None:
            sharing.setdefault(keys, {})[model_key] = model
    for keys, alike in sharing.items():
        found = {model_key: _misfits(_sizes(keys, get), model, keys) for model_key, model in alike.items()}
        wrong = tuple(model_key for model_key, each in found.items() if each)
        if wrong:
            together = dict.fromkeys(misfit for each in found.values() for misfit in each)
            yield VllmMisfit(wrong, tuple(together), tuple(_mends(keys, get, [*alike.values()])))


def refuse_vllm_misfits(models: Mapping[str, ModelFacts], get: Callable[[str], Any]) -> None:
    """ConfigError for the first of `vllm_misfits`."""
    for each in vllm_misfits(models, get):
        what, expected, found = told(each.misfits)
        raise ConfigError(what, where=each.misfits[0].key, expected=expected, found=found, hints=each.hints)


def _sizes(keys: VllmKeys, get: Callable[[str], Any]) -> LayoutSizes:
    def count(key: str | None) -> int:
        value = get(key) if key is not None else None
        return value if type(value) is int and value > 0 else 1

    return LayoutSizes(uses_vllm=True, generator_width=count(keys.width), generator_experts=count(keys.experts))


def _misfits(sizes: LayoutSizes, model: ModelFacts, keys: VllmKeys) -> list[Misfit]:
    return [replace(each, key=keys.written.get(each.key, each.key)) for each in model_misfits(sizes, model)]


def _mends(keys: VllmKeys, get: Callable[[str], Any], models: Sequence[ModelFacts]) -> Iterator[str]:
    """The next smaller width that fits every model, and doing without vLLM where it samples from another model."""
    sizes = _sizes(keys, get)
    divisors = (width for width in range(sizes.generator_width, 0, -1) if sizes.generator_width % width == 0)
    for width in divisors:
        experts = width if sizes.generator_experts > 1 else 1
        smaller = replace(sizes, generator_width=width, generator_experts=experts)
        if not any(_misfits(smaller, model, keys) for model in models):
            of_experts = f" {keys.experts}={experts}" if experts != sizes.generator_experts else ""
            yield f"{keys.width}={width}{of_experts}"
            return
    yield f"{keys.backend}=embedded {keys.width}=1" if sizes.generator_width > 1 else f"{keys.backend}=embedded"
