"""Fan-out: one stage as several, one for each value of a config key or input, before anything is planned.

A fanned-out stage `rlvr` over `grpo.seed` = 42, 43 is two stages, `rlvr-42` and `rlvr-43`. A stage that reads it at an
ordinary port is as many; a port that takes many (`models.rlvr = "rlvr"`) takes all of them, as `models.rlvr-42` and
`models.rlvr-43`. Everything after this knows stages only.

`--over KEY=V1,V2,…` and a pipeline's `fan_out` tables say what is fanned out over.
"""

import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any

from nemotron_steps.config.names import meant
from nemotron_steps.errors import RequestError
from nemotron_steps.manifest.pipeline_models import StageSource
from nemotron_steps.resolver.plan import Instance
from nemotron_steps.resolver.request import Goal, Request
from nemotron_steps.session.run_request import UsageError

_INPUTS = "inputs."
_LABEL_CHARS = 40
_Choice = Mapping[int, int]
"""Axis → which of its values: what tells the instances of a stage apart."""


@dataclass(frozen=True)
class Axis:
    """What a fan-out goes over."""

    keys: tuple[tuple[str, str], ...]
    """(stage, config key) of each key that gets the value; `inputs.PORT` is an input port."""
    values: tuple[str, ...]
    """What each instance has there, as the right-hand side of an override."""

    @property
    def name(self) -> str:
        """The first of its keys, with its stage."""
        return ".".join(self.keys[0])

    @property
    def labels(self) -> tuple[str, ...]:
        """The values as parts of a stage's name, numbered where they would be alike."""
        found = []
        for value in self.values:
            text = _plain(value)
            text = PurePath(text).stem or text if "/" in text else text
            found.append(re.sub(r"[^A-Za-z0-9_]+", "_", text).strip("_")[:_LABEL_CHARS] or "value")
        alike = {label for label in found if found.count(label) > 1}
        return tuple(f"{label}_{n}" if label in alike else label for n, label in enumerate(found, start=1))


def fanned_out(request: Request, axes: Sequence[Axis]) -> Request:
    """The request with every fanned-out stage, and what reads one, as its instances. RequestError if an instance would
    be called like another stage."""
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
    inputs = {}  # STAGE.PORT of a fanned-out stage is for each of its instances
    for target, reference in request.inputs.items():
        stage, dot, port = target.partition(".")
        instances = [goal.name for goal in goals if dot and goal.instance is not None and goal.instance.stage == stage]
        inputs.update(dict.fromkeys((f"{name}.{port}" for name in instances), reference) or {target: reference})
    return replace(request, goals=tuple(goals), inputs=inputs)


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


def _keys(axes: Sequence[Axis], stage: str | None) -> set[str]:
    return {key for axis in axes for owner, key in axis.keys if owner == stage}


def _suffix(choice: _Choice, axes: Sequence[Axis]) -> str:
    return "".join(f"-{axes[n].labels[at]}" for n, at in choice.items())


def _plain(value: str) -> str:
    """An override's value as the text it stands for."""
    if value[:1] in ("'", '"') and value[:1] == value[-1:]:
        value = value[1:-1]
    return re.sub(r"\\(.)", r"\1", value)


HasKey = Callable[[str, str], bool]
"""Whether a stage's step has a config key."""


def step_axes(over: Sequence[str], stage: str) -> list[Axis]:
    """Axes of `--over` where a step is asked for: keys are its own. UsageError for what is not KEY=V1,V2."""
    axes = []
    for text in over:
        keys, values = _parsed(text)
        axes.append(Axis(tuple((stage, key) for key in keys), values))
    return _without_repeats(axes)


def pipeline_axes(
    over: Sequence[str], declared: Mapping[str, Mapping[str, Sequence[Any]]], has_key: HasKey
) -> list[Axis]:
    """Axes of a pipeline: those that `--over` names, and of its stages' tables (`declared`, every stage is there) those
    that it does not. UsageError for an `--over` that is not `STAGE.KEY=V1,V2`, or that no stage takes."""
    axes = []
    for text in over:
        keys, values = _parsed(text)
        found = [pair for key in keys for pair in _stage_keys(key, list(declared), has_key, text)]
        axes.append(Axis(tuple(dict.fromkeys(found)), values))
    named = {pair for axis in axes for pair in axis.keys}
    for stage, table in declared.items():
        for key, given in table.items():
            if (stage, key) not in named:
                values = tuple(quoted(value) if isinstance(value, str) else json.dumps(value) for value in given)
                axes.append(Axis(((stage, key),), values))
    return _without_repeats(axes)


def _stage_keys(key: str, stages: list[str], has_key: HasKey, text: str) -> list[tuple[str, str]]:
    stage, _, rest = key.partition(".")
    where, names = f"--over {text}", ", ".join(stages)
    if stage == "*":  # every stage whose config has that key
        found = [(name, rest) for name in stages if has_key(name, rest)]
        if not found:
            raise UsageError(f"no stage has a config key '{rest}'", where=where, expected=f"a stage: {names}")
        return found
    if not rest or stage not in stages:
        close = meant(stage, stages)[:1] if rest else ()
        raise UsageError(
            "what a pipeline is fanned out over names its stage",
            where=where,
            expected=f"STAGE.KEY=V1,V2 with STAGE one of {names}, or *.KEY=V1,V2 for every stage with that key",
            found=key,
            hints=(f"--over '*.{text}'", *(f"--over {text.replace(stage, name, 1)}" for name in close)),
        )
    return [(stage, rest)]


def _parsed(text: str) -> tuple[list[str], tuple[str, ...]]:
    """Keys and values of `KEY[,KEY]=V1,V2,…`; the values in Hydra's grammar of sweeps, `range(1,4)` included."""
    left, equals, right = text.partition("=")
    keys = left.split(",")
    if not equals or not right or not all(re.fullmatch(r"(\*\.)?[\w-]+(\.[\w-]+)*", key) for key in keys):
        raise _unreadable(text)
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import OverrideParseException

    try:
        override = OverridesParser.create().parse_override(f"key={right}")
        values = tuple(override.sweep_string_iterator()) if override.is_sweep_override() else (right,)
    except OverrideParseException as error:
        raise _unreadable(text) from error
    return keys, values


def _unreadable(text: str) -> UsageError:
    return UsageError(
        "this cannot be fanned out over",
        where=f"--over {text}",
        expected="KEY=V1,V2,… where KEY is a config key, or inputs.PORT for an input",
        hints=("--over grpo.seed=42,43,44", "--over inputs.policy=MODEL_A,MODEL_B"),
    )


def _without_repeats(axes: list[Axis]) -> list[Axis]:
    seen: set[tuple[str, str]] = set()
    for axis in axes:
        for stage, key in axis.keys:
            if (stage, key) in seen:
                raise UsageError(f"'{key}' of {stage} is fanned out over twice", expected="one --over with all values")
            seen.add((stage, key))
        twice = next((value for value in axis.values if axis.values.count(value) > 1), None)
        if twice is not None:
            raise UsageError(f"two instances would be the same: {axis.name}={twice}", expected="each value once")
    return axes


def quoted(text: str) -> str:
    """A text in quotes that Hydra reads as it is: a backslash counts double only before a quote."""
    escaped = re.sub(r"(\\*)'", lambda found: found[1] * 2 + r"\'", text)
    tail = len(escaped) - len(escaped.rstrip("\\"))
    return "'" + escaped + "\\" * tail + "'"
