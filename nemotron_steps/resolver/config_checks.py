"""What holds whatever the step: parameters exist, values are among their choices, no placeholder is left, and the
artifacts at a step's ports are what it needs, and agree."""

import re
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

from nemotron_steps.config.names import nearest
from nemotron_steps.errors import StepsError, did_you_mean
from nemotron_steps.manifest.models import StepManifest
from nemotron_steps.resolver.problems import AttributeConflict, ParameterProblem, PlaceholderValue, PlanProblem
from nemotron_steps.resolver.request import StepConfig

_PLACEHOLDER = re.compile(r"\?\?\?|/?path/to/.*|<(your|path)[^<>]*>|(TODO|FIXME|CHANGE_?ME)\b.*", re.IGNORECASE)


def is_placeholder(value: Any) -> bool:
    """Whether a value only stands where a real one has to go (`/path/to/…`, `???`, `<your …>`)."""
    return isinstance(value, str) and _PLACEHOLDER.fullmatch(value) is not None


def check_parameters(manifest: StepManifest, config: StepConfig, key: str) -> list[PlanProblem]:
    """Parameters the config model does not have, and values that are not among a parameter's choices."""
    problems: list[PlanProblem] = []
    for index, parameter in enumerate(manifest.parameters):
        if config.has_key is not None and not config.has_key(parameter.name):
            problems.append(
                ParameterProblem(
                    f"parameter '{parameter.name}' of {manifest.id} is not a key of its config",
                    chain=(key,),
                    where=manifest.where("parameters", index, "name"),
                    expected=f"a key of {manifest.step.config_schema or 'its config model'}",
                    hints=did_you_mean(nearest(parameter.name, config.flat, 1)),
                )
            )
            continue
        value = config.flat.get(parameter.name)
        if parameter.name in config.flat and not parameter.allows(value):
            problems.append(
                ParameterProblem(
                    f"'{parameter.name}' of {key} is not one of its choices",
                    chain=(key,),
                    where=config.where(parameter.name) or manifest.where("parameters", index, "choices"),
                    expected=" or ".join(_shown(choice) for choice in parameter.choices),
                    found=_shown(value),
                    hints=tuple(f"{parameter.name}={_shown(choice)}" for choice in parameter.choices[:3]),
                )
            )
    return problems


def check_placeholders(manifest: StepManifest, config: StepConfig, key: str, fed: Container[str]) -> list[PlanProblem]:
    """Placeholder values, except at config keys that an input port fills in.

    `fed`: input ports that have a source, or whose lack of one was reported."""
    found = [
        (dotted, text)
        for dotted, value in config.flat.items()
        if type(value) is str or type(value) is list
        for text in _texts(value)
        if is_placeholder(text)
    ]
    if not found:
        return []
    filled = {name for port in manifest.consumes if port.required or port.name in fed for name in port.bindings}
    return [
        PlaceholderValue(
            f"'{dotted}' of {key} still has to be filled in",
            chain=(key,),
            where=config.where(dotted),
            expected="a real value",
            found=text,
            hints=(f"{dotted}=VALUE",),
        )
        for dotted, text in found
        if dotted not in filled
    ]


def merge_placeholders(problems: Sequence[StepsError]) -> list[StepsError]:
    """One problem for a placeholder that several steps take from the same line of a config, with a hint for each."""
    alike: dict[Any, list[StepsError]] = {}
    for problem in problems:
        key: Any = id(problem)
        if isinstance(problem, PlaceholderValue):
            key = (problem.where, problem.found, problem.what.partition(" of ")[0])
        alike.setdefault(key, []).append(problem)
    for group in alike.values():
        first = group[0]
        if len(group) == 1 or not isinstance(first, PlaceholderValue):
            continue
        *steps, last = [step for each in group if isinstance(each, PlaceholderValue) for step in each.chain]
        first.what = first.what.replace(f" of {steps[0]} ", f" of {', '.join(steps)} and {last} ")
        first.chain = ()
        first.hints = tuple(hint for each in group for hint in each.hints)
    return [group[0] for group in alike.values()]


def _texts(value: Any) -> Iterable[str]:
    """The strings in a value, at any depth of lists."""
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list | tuple):
        return [text for item in value for text in _texts(item)]
    return ()


def _shown(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def check_attributes(
    manifest: StepManifest,
    known: Mapping[str, Mapping[str, Any]],
    *,
    key: str | None = None,
    sources: Mapping[str, str] | None = None,
) -> list[AttributeConflict]:
    """Every requirement and constraint of a step that the attributes of its inputs break.

    `known`: port → attributes of the artifact bound to it; what is missing breaks nothing. `sources`: port → where its
    artifact comes from, for messages."""
    key = key or manifest.id
    sources = sources or {}
    problems = []
    for port in manifest.consumes:
        have = known.get(port.name, {})
        for name, wanted in port.attributes.items():
            allowed = wanted if isinstance(wanted, list) else [wanted]
            if name in have and have[name] not in allowed:
                problems.append(
                    AttributeConflict(
                        f"'{port.name}' of {key} needs another {name}",
                        chain=[*([sources[port.name]] if port.name in sources else []), f"{key}.{port.name}"],
                        where=manifest.where_input(port.name, "attributes", name),
                        expected=" or ".join(str(value) for value in allowed),
                        found=str(have[name]),
                    )
                )
    for index, constraint in enumerate(manifest.constraints):
        values = [
            (f"{port}.{name}", known[port][name], port)
            for place, name in constraint.terms
            for port in known
            if (port == place or port.startswith(f"{place}.")) and name in known[port]  # PORT.NAME: a port takes many
        ]
        first_term, first_value, first = values[0] if values else ("", None, "")
        for term, value, place in values[1:]:
            if value != first_value:
                compared = f"{sources.get(first, first)} and {sources.get(place, place)}"
                problems.append(
                    AttributeConflict(
                        constraint.description or f"{first_term} and {term} must be the same in {key}",
                        chain=(compared, f"{key}.{first} and {key}.{place}"),
                        where=manifest.where("constraints", index),
                        expected=f"{term} = {first_value} (as {first_term})",
                        found=str(value),
                        hints=(f"--input {place}=PATH   # another one",) if "." in place else (),
                    )
                )
    return problems
