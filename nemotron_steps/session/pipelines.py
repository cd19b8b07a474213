"""A pipeline on the command line: `STAGE.key=value`, `-c` as its file means it, `--from`, `--until`, `--over`.

A step that is fanned out is a pipeline of that one stage.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from nemotron_steps.config.names import meant
from nemotron_steps.config.secrets import shown_override
from nemotron_steps.resolver.request import Goal, Request, request_for_pipeline, request_for_steps
from nemotron_steps.session.fan_out import Axis, HasKey, fanned_out, pipeline_axes, step_axes
from nemotron_steps.session.run_request import UsageError

if TYPE_CHECKING:
    from nemotron_steps.manifest.pipeline_models import PipelineManifest
    from nemotron_steps.session.run_request import RunRequest


def pipeline_request(request: RunRequest, pipeline: PipelineManifest, has_key: HasKey) -> Request:
    """A pipeline's stages from --from to --until, with their configs and overrides, fanned out.

    `-c NAME` is the pipeline's own table of that name, else that config of every stage. UsageError for an override,
    --from, --until or --over that names no stage.
    """
    if request.passthrough:
        raise UsageError("a pipeline takes nothing after `--`", found=" ".join(request.passthrough))
    names = [stage.name for stage in pipeline.stages]
    begin = _position("--from", request.first, names) if request.first is not None else 0
    end = _position("--until", request.until, names) if request.until is not None else len(names) - 1
    if end < begin:
        raise UsageError(
            f"stage '{request.until}' comes before '{request.first}'",
            where=f"--from {request.first} --until {request.until}",
            expected=f"one of {', '.join(names[begin:])} at --until",
        )
    chain = request_for_pipeline(pipeline, inputs=dict(request.inputs))
    table = pipeline.configs.get(request.config or "", {})
    goals = []
    for position, (name, goal) in enumerate(zip(names[: end + 1], chain.goals, strict=False)):
        own = table.get(name)
        step = (own.step if own else None) or goal.step_id
        config = own.config if own else request.config or goal.config_name
        goals.append(replace(goal, step_id=step, config_name=config, earlier=position < begin))
    step_of = {goal.name or "": goal.step_id for goal in goals}
    declared = {stage.name: stage.fan_out for stage in pipeline.stages if stage.name in step_of}
    axes = pipeline_axes(request.over, declared, lambda stage, key: has_key(step_of[stage], key))
    chain = replace(chain, goals=tuple(goals), command=replace(request, overrides=(), inputs={}).command)
    return _overridden(chain, axes, request, list(step_of) + names[end + 1 :])


def fanned_out_step(request: RunRequest, passthrough: tuple[str, ...]) -> Request:
    """One step as many, over what `--over` says. UsageError for several steps, which would have to be wired."""
    if len(request.targets) > 1:
        raise UsageError(
            "--over fans out one step, or stages of a pipeline; a list of steps is neither",
            found=" ".join(request.targets),
            hints=(f"steps run {request.targets[-1]} --over {request.over[0]}",),
        )
    chain = request_for_steps(request.targets, config_name=request.config, inputs=dict(request.inputs))
    name = request.targets[0].rpartition(":")[2].rsplit("/", 1)[-1]
    goal = replace(chain.goals[0], name=name, overrides=passthrough)
    command = replace(request, overrides=(), inputs={}).command
    chain = replace(chain, goals=(goal,), command=command, chained=False)
    return _overridden(chain, step_axes(request.over, name), request, [name], own=name)


def _overridden(
    chain: Request, axes: list[Axis], request: RunRequest, names: list[str], own: str | None = None
) -> Request:
    """The request fanned out, with overrides of stages and, after what they are fanned out over, of instances."""
    instances = [goal.name or "" for goal in fanned_out(chain, axes).goals if goal.instance is not None]
    overrides = _overrides_by_stage(request, names, instances, own)

    def given(goal: Goal) -> Goal:
        return replace(goal, overrides=(*goal.overrides, *overrides.get(goal.name or "", ())))

    chain = fanned_out(replace(chain, goals=tuple(given(goal) for goal in chain.goals)), axes)
    for stage in request.ignore_checks:
        _position("--ignore-checks", stage, [*names, *instances])
    goals = []
    for goal in chain.goals:
        if goal.instance is not None:
            goal = given(goal)
        if {goal.name, goal.instance.stage if goal.instance else None} & set(request.ignore_checks):
            checks = tuple(check.model_copy(update={"severity": "warn"}) for check in goal.checks)
            goal = replace(goal, checks=checks)
        goals.append(goal)
    return replace(chain, goals=tuple(goals))


def _position(flag: str, stage: str, names: list[str]) -> int:
    if stage not in names:
        raise UsageError(
            f"there is no stage '{stage}'",
            where=f"{flag} {stage}",
            expected=f"one of {', '.join(names)}",
            hints=[f"{flag} {name}" for name in meant(stage, names)[:2]],
        )
    return names.index(stage)


def _overrides_by_stage(
    request: RunRequest, names: list[str], instances: list[str], own: str | None
) -> dict[str, list[str]]:
    """`STAGE.key=value` as `key=value` of each stage, or instance of one; others are those of the stage `own`."""
    extra: dict[str, list[str]] = {}
    for text in request.overrides:
        key = text.lstrip("+~")
        prefix = text[: len(text) - len(key)]
        stage, dot, rest = key.partition(".")
        if own is not None and stage not in instances:
            extra.setdefault(own, []).append(text)
            continue
        if not dot or stage not in (*names, *instances):
            shown = shown_override(text)
            raise UsageError(
                "an override of a pipeline names its stage",
                where=f"override '{shown}'",
                expected=f"STAGE.key=value with STAGE one of {', '.join(names)}",
                hints=(f"{prefix}{names[-1]}.{shown[len(prefix) :]}",),
            )
        extra.setdefault(stage, []).append(prefix + rest)
    return extra
