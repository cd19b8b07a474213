"""`${art:NAME}` at a config key → the reference of the artifact that feeds the input bound to the key."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

from nemotron_steps.config.compose import Reference, read_reference
from nemotron_steps.manifest.models import Consumes, StepManifest
from nemotron_steps.resolver.problems import AmbiguousSource, PlanProblem, UnknownPort
from nemotron_steps.resolver.request import StepConfig

_SPLITS = {"val": "validation", "test": "heldout"}
"""Splits there → here."""


def with_references(manifest: StepManifest, config: StepConfig, key: str) -> tuple[StepConfig, list[PlanProblem]]:
    """The config with every reference readable as what `--input` takes, and what is wrong about them.

    An input is fed at the first key that it is bound to; it fills its other keys, so a reference there is left out. It
    comes before the source that the `inputs` of a base config gives the same port.

    Args:
        key: the step's key in the plan.
    """
    found = {name: each for name, value in config.flat.items() if (each := read_reference(value)) is not None}
    given = {port: each.ref for port, source in config.inputs.items() if (each := read_reference(source)) is not None}
    if not found and not given:
        return config, []
    values, inputs = copy.deepcopy(dict(config.values)), {**config.inputs, **given}
    problems: list[PlanProblem] = []
    bound: set[str] = set()
    for port in manifest.consumes:
        first, *others = [name for name in port.bindings if name in found and name not in bound] or [""]
        if not first or first != next(iter(port.bindings)):
            continue
        bound |= {first, *others}
        inputs.pop(port.name, None)
        problems += _wrong_parts(port, config, key, {name: found[name] for name in (first, *others)})
        _put(values, first, found[first].ref)
        for name in others:
            _put(values, name, None)
    fed_at = [next(iter(port.bindings)) for port in manifest.consumes if port.bindings]
    problems += [
        UnknownPort(
            f"'{name}' of {key} names an artifact, and no input is fed at that key",
            chain=(key,),
            where=config.where(name),
            expected=", ".join(fed_at) or "no artifact",
            found=str(each),
            hints=(f"steps artifacts show {each.ref}",),
        )
        for name, each in found.items()
        if name not in bound
    ]
    return replace(config, values=values, inputs=inputs), problems


def _wrong_parts(port: Consumes, config: StepConfig, key: str, here: dict[str, Reference]) -> list[PlanProblem]:
    first = next(iter(here.values()))
    problems: list[PlanProblem] = []
    for name, each in here.items():
        if each.ref != first.ref:
            problems.append(
                AmbiguousSource(
                    f"the config names several artifacts for the input '{port.name}' of {key}",
                    chain=(f"{key}.{port.name}",),
                    where=config.where(name),
                    expected=str(first),
                    found=str(each),
                    hints=(f"--input {port.name}={first.ref}", f"{name}=PATH"),
                )
            )
        elif not _fits(each, port.bindings[name]):
            problems.append(
                UnknownPort(
                    f"'{name}' of {key} takes another part of the artifact than its input fills in",
                    chain=(f"{key}.{port.name}",),
                    where=config.where(name),
                    expected=str(Reference(each.ref, "path")),
                    found=str(each),
                    hints=(f"{name}='{Reference(each.ref, 'path')}'",),
                )
            )
    return problems


def _fits(reference: Reference, inside: str) -> bool:
    """Whether a reference's field is the part of an artifact that a key is bound to. Of `A.jsonl|B.jsonl` that is A:
    where an artifact has both, B is not what the key would get."""
    split = inside.partition("|")[0].removesuffix(".jsonl") if inside.endswith(".jsonl") else None
    return reference.field == "path" or _SPLITS.get(reference.field, reference.field) == split


def _put(values: dict[str, Any], key: str, value: Any) -> None:
    *parents, last = key.split(".")
    node = values
    for part in parents:
        node = node[part]
    node[last] = value
