"""Inputs among the overrides: `prompts=rows.jsonl` for `--input prompts=rows.jsonl`, which is easily left out."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from nemotron_steps.config.secrets import redact_text
from nemotron_steps.errors import ConfigError, StepsError
from nemotron_steps.manifest.models import Consumes, StepManifest
from nemotron_steps.resolver.graph import Graph
from nemotron_steps.resolver.request import Compose, Goal


def take_out_inputs(
    goal: Goal, key: str, steps: Mapping[str, StepManifest], graph: Graph, compose: Compose, *, alone: bool
) -> tuple[tuple[str, ...], list[tuple[str, str]]]:
    """A step's overrides without those that name an input and that its config refuses; each of them is reported.

    Args:
        key: how the plan calls the step.
        steps: key → manifest of the steps whose inputs a bare override may name, the step itself first.
        alone: whether the request has no other step, so that an input needs no step in front.

    Returns:
        The overrides that are left, and (step's key, port) of those that were taken out.
    """
    kept: list[str] = []
    taken: list[tuple[str, str]] = []
    for override in goal.overrides:
        name, _, value = override.lstrip("+").partition("=")
        found = _port(name, steps)
        if not value or found is None or not _refused(goal, override, compose):
            kept.append(override)
            continue
        owner, port = found
        taken.append((owner, port.name))
        many = port.many and name == port.name
        stage = goal.instance.stage if goal.instance is not None and owner == key else owner
        target = f"{'' if alone else f'{stage}.'}{name}{'.NAME' if many else ''}"
        hint = f"--input {shlex.quote(redact_text(f'{target}={_bare(value)}'))}"
        graph.report(
            ConfigError(
                f"'{name}' is an input of {owner}, and an input is given by --input",
                where=f"override '{redact_text(override)}'",
                expected=f"--input {name}{'.NAME' if many else ''}=REF; each input has an --input of its own",
                found="an override",
                hints=(hint,),
            )
        )
    return tuple(kept), taken


def _port(name: str, steps: Mapping[str, StepManifest]) -> tuple[str, Consumes] | None:
    """The first step, and its port, that `PORT` or, of a port that takes many, `PORT.NAME` is for."""
    for key, manifest in steps.items():
        for port in manifest.consumes:
            if name == port.name or (port.many and name.startswith(f"{port.name}.")):
                return key, port
    return None


def _refused(goal: Goal, override: str, compose: Compose) -> bool:
    """Whether the config takes offence at an override: a port may have the name of a key."""
    return bool(_mistakes(goal, (override,), compose) - _mistakes(goal, (), compose))


def _mistakes(goal: Goal, overrides: Sequence[str], compose: Compose) -> set[str]:
    try:
        compose(goal.step_id, goal.config_name, overrides)
    except StepsError as error:
        return {str(problem) for problem in getattr(error, "problems", ()) or (error,)}
    return set()


def _bare(value: str) -> str:
    """A value without the quotes that Hydra's grammar wants and `--input` does not."""
    return value[1:-1] if len(value) > 2 and value[0] == value[-1] and value[0] in "'\"" else value
