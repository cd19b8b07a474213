"""A pipeline on the command line: `STAGE.key=value`, `-c` as its file means it, `--from`, `--until`, and fan-out.

Fan-out makes one stage several, before anything is planned: `rlvr` over `grpo.seed` = 42, 43 is two stages, `rlvr-42`
and `rlvr-43`. A stage that reads it at an ordinary port is as many; a port that takes many (`models.rlvr = "rlvr"`)
takes all of them, as `models.rlvr-42` and `models.rlvr-43`. `--over KEY=V1,V2,…` and a pipeline's `fan_out` tables say
what is fanned out over. A step that is fanned out is a pipeline of that one stage.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import TYPE_CHECKING

from nemotron_steps.config.names import meant
from nemotron_steps.config.secrets import shown_override
from nemotron_steps.errors import RequestError
from nemotron_steps.manifest.pipeline_models import StageSource
from nemotron_steps.resolver.plan import Instance
from nemotron_steps.resolver.request import Goal, Request, request_for_pipeline, request_for_steps
from nemotron_steps.session.run_request import UsageError

if TYPE_CHECKING:
    from nemotron_steps.manifest.pipeline_models import PipelineManifest
    from nemotron_steps.session.run_request import RunRequest

_INPUTS = "inputs."
HasKey = Callable[[str, str], bool]
"""Whether a step's config has a key."""
_Choice = Mapping[int, int]
"""Axis → which of its values: what tells the instances of a stage apart."""


def pipeline_request(request: RunRequest, pipeline: PipelineManifest, has_key: HasKey) -> Request:
    """A pipeline's stages from --from to --until, with their configs and overrides, fanned out.

    `-c NAME` is the pipeline's own table of that name, else that config of every stage. UsageError for an override,
    --from, --until or --over that names no stage.
    """
    if request.passthrough:
        raise UsageError("a pipeline takes nothing after `--`", found=" ".join(request.passthrough))
    names = [stage.name for stage in pipeline.stages]
    begin = _position("--from", request.first or names[0], names)
    end = _position("--until", request.until or names[-1], names)
    if end < begin:
        what, later = f"stage '{request.until}' comes before '{request.first}'", ", ".join(names[begin:])
        raise UsageError(what, where=f"--until {request.until}", expected=f"one of {later}")
    chain = request_for_pipeline(pipeline, inputs=dict(request.inputs))
    table = pipeline.configs.get(request.config or "", {})
    goals = []
    for position, (name, goal) in enumerate(zip(names[: end + 1], chain.goals, strict=False)):
        own = table.get(name)
        step = (own.step if own else None) or goal.step_id
        config = own.config if own else request.config or goal.config_name
        goals.append(replace(goal, step_id=step, config_name=config, earlier=position < begin))
    step_of = {goal.name or "": goal.step_id for goal in goals}
    axes = _pipeline_axes(request.over, list(step_of), lambda stage, key: has_key(step_of[stage], key))
    named = {pair for axis in axes for pair in axis.keys}
    for stage in pipeline.stages[: end + 1]:
        for key, given in stage.fan_out.items():
            if (stage.name, key) not in named:
                values = [quoted(value) if isinstance(value, str) else json.dumps(value) for value in given]
                axes.append(Axis([(stage.name, key)], values))
    chain = replace(chain, goals=tuple(goals), command=replace(request, overrides=(), inputs={}).command)
    return _overridden(chain, axes, request, names)


def fanned_out_step(request: RunRequest, passthrough: tuple[str, ...]) -> Request:
    """One step as many, over what `--over` says. UsageError for several steps, which would have to be wired."""
    if len(request.targets) > 1:
        what = "--over fans out one step, or stages of a pipeline; a list of steps is neither"
        raise UsageError(what, hints=(f"steps run {request.targets[-1]} --over {request.over[0]}",))
    chain = request_for_steps(request.targets, config_name=request.config, inputs=dict(request.inputs))
    name = request.targets[0].rpartition(":")[2].rsplit("/", 1)[-1]
    goal = replace(chain.goals[0], name=name, overrides=passthrough)
    command = replace(request, overrides=(), inputs={}).command
    axes = []
    for text in request.over:
        keys, values = _parsed(text)
        axes.append(Axis([(name, key) for key in keys], values))
    return _overridden(replace(chain, goals=(goal,), command=command, chained=False), axes, request, [name], name)


def _overridden(
    chain: Request, axes: Sequence[Axis], request: RunRequest, names: list[str], own: str | None = None
) -> Request:
    """The request fanned out, with overrides of stages and, after what they are fanned out over, of instances. `own`:
    the stage of overrides that name none."""
    _refuse_repeats(axes)
    instances = {goal.name for goal in fanned_out(chain, axes).goals if goal.instance is not None}
    overrides: dict[str, list[str]] = {}
    for text in request.overrides:
        key = text.lstrip("+~")
        stage, _, rest = key.partition(".")
        if own is not None and stage not in instances:
            stage, rest = own, key
        overrides.setdefault(stage, []).append(text[: len(text) - len(key)] + rest)

    def given(goal: Goal) -> Goal:
        return replace(goal, overrides=(*goal.overrides, *overrides.get(goal.name or "", ())))

    chain = fanned_out(replace(chain, goals=tuple(given(goal) for goal in chain.goals)), axes)
    known = [*names, *(goal.name or "" for goal in chain.goals if goal.instance is not None)]
    for text in request.overrides:
        stage, dot, _ = text.lstrip("+~").partition(".")
        if own is None and (not dot or stage not in known):
            shown, expected = shown_override(text), f"STAGE.key=value with STAGE one of {', '.join(names)}"
            hint = re.sub(r"^([+~]*)", rf"\g<1>{names[-1]}.", shown)
            what, where = "an override of a pipeline names its stage", f"override '{shown}'"
            raise UsageError(what, where=where, expected=expected, hints=(hint,))
    for stage in request.ignore_checks:
        _position("--ignore-checks", stage, known)
    goals = []
    for goal in chain.goals:
        names_of = {goal.name, goal.instance.stage if goal.instance else None}
        each = given(goal) if goal.instance else goal
        if names_of & set(request.ignore_checks):
            checks = tuple(check.model_copy(update={"severity": "warn"}) for check in goal.checks)
            each = replace(each, checks=checks)
        goals.append(each)
    return replace(chain, goals=tuple(goals))


def _position(flag: str, stage: str, names: list[str]) -> int:
    if stage in names:
        return names.index(stage)
    hints = [f"{flag} {name}" for name in meant(stage, names)[:2]]
    what, expected = f"there is no stage '{stage}'", f"one of {', '.join(names)}"
    raise UsageError(what, where=f"{flag} {stage}", expected=expected, hints=hints)


# -- fan-out --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Axis:
    """What a fan-out goes over."""

    keys: Sequence[tuple[str, str]]
    """(stage, config key) of each key that gets the value; `inputs.PORT` is an input port."""
    values: Sequence[str]
    """What each instance has there, as the right-hand side of an override."""

    @property
    def labels(self) -> list[str]:
        """The values as parts of a stage's name, numbered where they would be alike."""
        found = []
        for value in self.values:
            text = _plain(value)
            text = PurePath(text).stem or text if "/" in text else text
            found.append(re.sub(r"[^A-Za-z0-9_]+", "_", text).strip("_")[:40] or "value")
        return [f"{label}_{n}" if found.count(label) > 1 else label for n, label in enumerate(found, start=1)]


def fanned_out(request: Request, axes: Sequence[Axis]) -> Request:
    """The request with every fanned-out stage, and what reads one, as its instances. RequestError if an instance would
    be called like another stage."""
    of_stage: dict[str, list[int]] = {}
    goals: list[Goal] = []
    for goal in request.goals:
        stage = goal.name or ""
        here = [(n, key) for n, axis in enumerate(axes) for owner, key in axis.keys if owner == stage]
        own = {n for n, _ in here}
        fed = {key for _, key in here}
        for port, source in goal.wired.items():
            if "." not in port and source.stage is not None and f"{_INPUTS}{port}" not in fed:
                own.update(of_stage.get(source.stage, ()))
        of_stage[stage] = sorted(own)
        goals += [_instance(goal, choice, axes, of_stage) for choice in _choices(of_stage[stage], axes)]
    names = [goal.name for goal in goals]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise RequestError(f"two stages would be called '{twice}': an instance of a fan-out, and another stage")
    inputs = {}  # STAGE.PORT of a fanned-out stage is for each of its instances
    for target, reference in request.inputs.items():
        stage, _, port = target.partition(".")
        instances = [goal.name for goal in goals if port and goal.instance is not None and goal.instance.stage == stage]
        inputs.update(dict.fromkeys((f"{name}.{port}" for name in instances), reference) or {target: reference})
    return replace(request, goals=tuple(goals), inputs=inputs)


def _choices(own: Sequence[int], axes: Sequence[Axis]) -> Iterator[_Choice]:
    for values in itertools.product(*(range(len(axes[n].values)) for n in own)):
        yield dict(zip(own, values, strict=True))


def _instance(goal: Goal, choice: _Choice, axes: Sequence[Axis], of_stage: Mapping[str, Sequence[int]]) -> Goal:
    """One of a stage's instances, reading those instances of other stages that go with it."""
    overrides, wired, where = list(goal.overrides), {}, dict(goal.where)
    fed = {key for axis in axes for owner, key in axis.keys if owner == goal.name}
    for port, source in goal.wired.items():
        if f"{_INPUTS}{port}" in fed:
            continue
        theirs = of_stage.get(source.stage or "", ())
        # What both stages are fanned out over goes together; a port that takes many takes all of the rest.
        for rest in _choices([n for n in theirs if n not in choice], axes):
            name = f"{port}{_suffix(rest, axes)}"
            both = {n: {**choice, **rest}[n] for n in theirs}
            stage = source.stage and f"{source.stage}{_suffix(both, axes)}"
            wired[name] = source.changed(stage=stage) if both else source
            where[name] = goal.where.get(port, "")
    for n, at in choice.items():
        for stage, key in axes[n].keys:
            if stage == goal.name and key.startswith(_INPUTS):  # in the place of what the port is wired to
                wired[key.removeprefix(_INPUTS)] = StageSource(ref=_plain(axes[n].values[at]))
            elif stage == goal.name:
                overrides.append(f"{key}={axes[n].values[at]}")
    if not choice:
        return replace(goal, wired=wired, where=where)
    labels = {".".join(axes[n].keys[0]): _plain(axes[n].values[at]) for n, at in choice.items()}
    name = f"{goal.name}{_suffix(choice, axes)}"
    instance = Instance(goal.name or "", labels)
    return replace(goal, name=name, overrides=tuple(overrides), wired=wired, where=where, instance=instance)


def _suffix(choice: _Choice, axes: Sequence[Axis]) -> str:
    return "".join(f"-{axes[n].labels[at]}" for n, at in choice.items())


def _plain(value: str) -> str:
    """An override's value as the text it stands for."""
    if value[:1] in ("'", '"') and value[:1] == value[-1:]:
        value = value[1:-1]
    return re.sub(r"\\(.)", r"\1", value)


def _pipeline_axes(over: Sequence[str], stages: list[str], has_key: HasKey) -> list[Axis]:
    """Axes of a pipeline's `--over`. UsageError for one that is not `STAGE.KEY=V1,V2`, or that no stage takes."""
    axes = []
    for text in over:
        keys, values = _parsed(text)
        pairs: dict[tuple[str, str], None] = {}
        for key in keys:
            stage, _, rest = key.partition(".")
            found = [name for name in stages if stage in ("*", name) and (stage != "*" or has_key(name, rest))]
            if not found or not rest:
                what = f"no stage has a config key '{rest}'" if stage == "*" else f"'{key}' names no stage"
                expected = f"STAGE.KEY=V1,V2 with STAGE one of {', '.join(stages)}, or * for every stage with that key"
                hints = () if stage == "*" else (f"--over '*.{text}'",)
                raise UsageError(what, where=f"--over {text}", expected=expected, hints=hints)
            pairs |= dict.fromkeys((name, rest) for name in found)
        axes.append(Axis(list(pairs), values))
    return axes


def _parsed(text: str) -> tuple[list[str], Sequence[str]]:
    """Keys and values of `KEY[,KEY]=V1,V2,…`; the values in Hydra's grammar of sweeps, `range(1,4)` included."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import OverrideParseException

    left, _, right = text.partition("=")
    keys = left.split(",")
    try:
        if right and all(re.fullmatch(r"(\*\.)?[\w-]+(\.[\w-]+)*", key) for key in keys):
            override = OverridesParser.create().parse_override(f"key={right}")
            return keys, list(override.sweep_string_iterator()) if override.is_sweep_override() else [right]
    except OverrideParseException:
        pass
    expected = "KEY=V1,V2,… where KEY is a config key, or inputs.PORT for an input"
    hints = ("--over grpo.seed=42,43,44",)
    raise UsageError("this cannot be fanned out over", where=f"--over {text}", expected=expected, hints=hints)


def _refuse_repeats(axes: Sequence[Axis]) -> None:
    pairs = [pair for axis in axes for pair in axis.keys]
    for stage, key in pairs:
        if pairs.count((stage, key)) > 1:
            raise UsageError(f"'{key}' of {stage} is fanned out over twice", expected="one --over with all values")
    for axis in axes:
        if len(set(axis.values)) < len(axis.values):
            raise UsageError(f"two instances would be the same: {'.'.join(axis.keys[0])}={','.join(axis.values)}")


def quoted(text: str) -> str:
    """A text in quotes that Hydra reads as it is: a backslash counts double only before a quote."""
    escaped = re.sub(r"(\\*)'", lambda found: found[1] * 2 + r"\'", text)
    tail = len(escaped) - len(escaped.rstrip("\\"))
    return "'" + escaped + "\\" * tail + "'"
