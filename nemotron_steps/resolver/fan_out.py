"""Fan-out: one stage as several, one for each value of a config key or input, before anything is planned.

A fanned-out stage `rlvr` over `grpo.seed` = 42, 43 is two stages, `rlvr-42` and `rlvr-43`. A stage that reads it at an
ordinary port is as many; a port that takes many (`models.rlvr = "rlvr"`) takes all of them, as `models.rlvr-42` and
`models.rlvr-43`. Everything after this knows stages only.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath

from nemotron_steps.errors import RequestError
from nemotron_steps.manifest.pipeline_models import StageSource
from nemotron_steps.resolver.plan import Instance
from nemotron_steps.resolver.request import Goal, Request

_INPUTS = "inputs."
_LABEL_CHARS = 40
_Choice = Mapping[int, int]
"""Axis → which of its values: what tells the instances of a stage apart."""


@dataclass(frozen=True)
class Axis:
    """What a fan-out goes over.

    Attributes:
        keys: (stage, config key) of each key that gets the value; `inputs.PORT` is an input port.
        values: what each instance has there, as the right-hand side of an override.
    """

    keys: tuple[tuple[str, str], ...]
    values: tuple[str, ...]

    @property
    def name(self) -> str:
        """The first of its keys, with its stage."""
        return ".".join(self.keys[0])

    @property
    def labels(self) -> tuple[str, ...]:
        """The values as parts of a stage's name, numbered where they would be alike."""
        found = [_label(value) for value in self.values]
        alike = {label for label in found if found.count(label) > 1}
        return tuple(f"{label}_{n}" if label in alike else label for n, label in enumerate(found, start=1))


def fanned_out(request: Request, axes: Sequence[Axis]) -> Request:
    """The request with every fanned-out stage, and what reads one, as its instances.

    Raises RequestError if an instance would be called like another stage.
    """
    of_stage: dict[str, tuple[int, ...]] = {}
    goals: list[Goal] = []
    for goal in request.goals:
        own = {n for n, axis in enumerate(axes) if any(stage == goal.name for stage, _ in axis.keys)}
        for port, source in goal.wired.items():
            if "." not in port and source.stage is not None and f"{_INPUTS}{port}" not in _keys(axes, goal.name):
                own.update(of_stage.get(source.stage, ()))
        of_stage[goal.name or ""] = tuple(sorted(own))
        goals += [_instance(goal, choice, axes, of_stage) for choice in _choices(tuple(sorted(own)), axes)]
    names = [goal.name for goal in goals]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise RequestError(
            f"two stages would be called '{twice}': an instance of a fan-out, and another stage",
            expected="stages with names of their own",
        )
    return replace(request, goals=tuple(goals), inputs=dict(_inputs(request.inputs, goals)))


def _choices(own: tuple[int, ...], axes: Sequence[Axis]) -> Iterator[_Choice]:
    for values in itertools.product(*(range(len(axes[n].values)) for n in own)):
        yield dict(zip(own, values, strict=True))


def _instance(goal: Goal, choice: _Choice, axes: Sequence[Axis], of_stage: Mapping[str, tuple[int, ...]]) -> Goal:
    overrides, wired, where = list(goal.overrides), {}, dict(goal.where)
    fanned = _keys(axes, goal.name)
    for port, source in goal.wired.items():
        if f"{_INPUTS}{port}" in fanned:  # its values take the place of what it is wired to
            continue
        if source.stage is None or not of_stage.get(source.stage):
            wired[port] = source
            continue
        # What both stages are fanned out over goes together; a port that takes many takes all of the rest.
        theirs = of_stage[source.stage]
        shared = {n: at for n, at in choice.items() if n in theirs}
        for rest in _choices(tuple(n for n in theirs if n not in choice), axes):
            name = f"{port}{_suffix(rest, axes)}" if rest else port
            stage = f"{source.stage}{_suffix({n: {**shared, **rest}[n] for n in theirs}, axes)}"
            wired[name] = StageSource(stage=stage, port=source.port)
            if port in goal.where:
                where[name] = goal.where[port]
    for n, at in choice.items():
        for stage, key in axes[n].keys:
            if stage == goal.name and key.startswith(_INPUTS):
                wired[key.removeprefix(_INPUTS)] = StageSource(ref=_plain(axes[n].values[at]))
            elif stage == goal.name:
                overrides.append(f"{key}={axes[n].values[at]}")
    if not choice:
        return replace(goal, wired=wired, where=where)
    labels = {axes[n].name: axes[n].labels[at] for n, at in choice.items()}
    name = f"{goal.name}{_suffix(choice, axes)}"
    instance = Instance(goal.name or "", labels)
    return replace(goal, name=name, overrides=tuple(overrides), wired=wired, where=where, instance=instance)


def _inputs(inputs: Mapping[str, str], goals: Sequence[Goal]) -> Iterator[tuple[str, str]]:
    """`STAGE.PORT` of a fanned-out stage for each of its instances."""
    for target, reference in inputs.items():
        stage, dot, port = target.partition(".")
        instances = [goal.name for goal in goals if dot and goal.instance is not None and goal.instance.stage == stage]
        yield from ((f"{name}.{port}", reference) for name in instances)
        if not instances:
            yield target, reference


def _keys(axes: Sequence[Axis], stage: str | None) -> set[str]:
    return {key for axis in axes for owner, key in axis.keys if owner == stage}


def _suffix(choice: _Choice, axes: Sequence[Axis]) -> str:
    return "".join(f"-{axes[n].labels[at]}" for n, at in choice.items())


def _plain(value: str) -> str:
    """An override's value as the text it stands for."""
    if value[:1] in ("'", '"') and value[:1] == value[-1:]:
        value = value[1:-1]
    return re.sub(r"\\(.)", r"\1", value)


def _label(value: str) -> str:
    text = _plain(value)
    if "/" in text:
        text = PurePath(text).stem or text
    return re.sub(r"[^A-Za-z0-9_]+", "_", text).strip("_")[:_LABEL_CHARS] or "value"
