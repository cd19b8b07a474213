"""`--over KEY=V1,V2,…` and a pipeline's `fan_out` tables, as the resolver's axes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nemotron_steps.config.names import meant
from nemotron_steps.resolver.fan_out import Axis
from nemotron_steps.session.run_request import UsageError

EVERY = "*"
"""The stage in `*.KEY`: every stage whose config has that key."""

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
    """Axes of a pipeline: those that `--over` names, and of its stages' tables those that it does not.

    Args:
        declared: stage → its `fan_out` table, empty for most; every stage is there.

    Raises UsageError for an `--over` that is not `STAGE.KEY=V1,V2`, or that no stage takes.
    """
    axes = []
    for text in over:
        keys, values = _parsed(text)
        found = [pair for key in keys for pair in _stage_keys(key, list(declared), has_key, text)]
        axes.append(Axis(tuple(dict.fromkeys(found)), values))
    named = {pair for axis in axes for pair in axis.keys}
    for stage, table in declared.items():
        for key, given in table.items():
            if (stage, key) not in named:
                axes.append(Axis(((stage, key),), tuple(_override_value(value) for value in given)))
    return _without_repeats(axes)


def _stage_keys(key: str, stages: list[str], has_key: HasKey, text: str) -> list[tuple[str, str]]:
    stage, _, rest = key.partition(".")
    where = f"--over {text}"
    if stage == EVERY:
        found = [(name, rest) for name in stages if has_key(name, rest)]
        if not found:
            raise UsageError(f"no stage has a config key '{rest}'", where=where, expected=f"a stage: {_list(stages)}")
        return found
    if not rest or stage not in stages:
        raise UsageError(
            "what a pipeline is fanned out over names its stage",
            where=where,
            expected=f"STAGE.KEY=V1,V2 with STAGE one of {_list(stages)}, or *.KEY=V1,V2 for every stage with that key",
            found=key,
            hints=(
                f"--over '*.{text}'",
                *(f"--over {text.replace(stage, name, 1)}" for name in meant(stage, stages)[:1] if rest),
            ),
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
        "this is nothing to fan out over",
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


def _override_value(value: Any) -> str:
    """A value of a TOML file in Hydra's grammar."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return quoted(value)
    return repr(value)


def _list(names: Sequence[str]) -> str:
    return ", ".join(names)


def quoted(text: str) -> str:
    """A text in quotes that Hydra reads as it is: a backslash counts double only before a quote."""
    escaped = re.sub(r"(\\*)'", lambda found: found[1] * 2 + r"\'", text)
    tail = len(escaped) - len(escaped.rstrip("\\"))
    return "'" + escaped + "\\" * tail + "'"
