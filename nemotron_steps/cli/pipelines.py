"""A pipeline on the command line: `STAGE.key=value`, `-c` as its file means it, `--from STAGE` and `--until STAGE`."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from nemotron_steps.cli.parser import UsageError
from nemotron_steps.config.names import nearest
from nemotron_steps.config.redaction import shown_override
from nemotron_steps.resolver.request import Request, request_for_pipeline

if TYPE_CHECKING:
    from nemotron_steps.cli.request import Asked
    from nemotron_steps.manifest.models import PipelineManifest


def pipeline_request(asked: Asked, pipeline: PipelineManifest) -> Request:
    """A pipeline's stages from --from to --until, with their configs and overrides.

    `-c NAME` is the pipeline's own table of that name, else that config of every stage.

    Raises:
        UsageError: an override, --from or --until names no stage; --until comes before --from.
    """
    if asked.passthrough:
        raise UsageError("a pipeline takes nothing after `--`", found=" ".join(asked.passthrough))
    names = [stage.name for stage in pipeline.stages]
    overrides = _overrides_by_stage(asked, names)
    begin = _position("--from", asked.first, names) if asked.first is not None else 0
    end = _position("--until", asked.until, names) if asked.until is not None else len(names) - 1
    if end < begin:
        raise UsageError(
            f"stage '{asked.until}' comes before '{asked.first}'",
            where=f"--from {asked.first} --until {asked.until}",
            expected=f"one of {', '.join(names[begin:])} at --until",
        )
    request = request_for_pipeline(pipeline, inputs=dict(asked.inputs))
    table = pipeline.configs.get(asked.config or "", {})
    goals = tuple(
        replace(
            goal,
            step_id=(table[name].step if name in table else None) or goal.step_id,
            config_name=table[name].config if name in table else asked.config or goal.config_name,
            overrides=(*goal.overrides, *overrides.get(name, ())),
            earlier=position < begin,
        )
        for position, (name, goal) in enumerate(zip(names, request.goals, strict=True))
        if position <= end
    )
    command = replace(asked, overrides=(), inputs={}).command
    return replace(request, goals=goals, command=command)


def _position(flag: str, stage: str, names: list[str]) -> int:
    if stage in names:
        return names.index(stage)
    raise UsageError(
        f"there is no stage '{stage}'",
        where=f"{flag} {stage}",
        expected=f"one of {', '.join(names)}",
        hints=tuple(f"{flag} {name}" for name in nearest(stage, names)[:2]),
    )


def _overrides_by_stage(asked: Asked, names: list[str]) -> dict[str, list[str]]:
    """`STAGE.key=value` as `key=value` of each stage."""
    extra: dict[str, list[str]] = {}
    for text in asked.overrides:
        mark = re.match(r"[+~]*", text)
        prefix = mark[0] if mark else ""
        stage, dot, rest = text[len(prefix) :].partition(".")
        if not dot or stage not in names:
            shown = shown_override(text)
            raise UsageError(
                "an override of a pipeline names its stage",
                where=f"override '{shown}'",
                expected=f"STAGE.key=value with STAGE one of {', '.join(names)}",
                hints=(f"{prefix}{names[-1]}.{shown[len(prefix) :]}",),
            )
        extra.setdefault(stage, []).append(prefix + rest)
    return extra
