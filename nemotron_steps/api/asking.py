"""Python values → the request that the command line would make of them, overrides in Hydra's grammar."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from nemotron_steps.artifacts.models import Artifact
from nemotron_steps.cli.request import Asked
from nemotron_steps.errors import RequestError

Overrides = Iterable[str] | Mapping[str, Any]
Target = str | Iterable[str]
Input = str | os.PathLike[str] | Artifact

_BARE = re.compile(r"[A-Za-z/][\w./:-]*", re.ASCII)
_WORDS = frozenset({"null", "true", "false", "inf", "nan"})


def asked_for(
    target: Target,
    *,
    config: str | os.PathLike[str] | None = None,
    inputs: Mapping[str, Input] | None = None,
    overrides: Overrides = (),
    sections: Mapping[str, Any] | None = None,
    profile: str | None = None,
    first: str | None = None,
    until: str | None = None,
) -> Asked:
    """A request.

    Args:
        target: a step, a pipeline, or several steps to be chained.
        config: the name of a config, or the path of a file.
        inputs: port → path, reference or artifact.
        overrides: texts as on the command line, or dotted keys and values.
        sections: keys of the config and their values, nested as in its file.
        first, until: stages of a pipeline.

    Raises RequestError for what no command line could say.
    """
    targets = (target,) if isinstance(target, str) else tuple(target)
    if not targets or not all(isinstance(each, str) and each for each in targets):
        raise RequestError("name a step or a pipeline", found=repr(target), hints=("run('rl/nemo_rl/rlvr')",))
    return Asked(
        targets,
        (*override_list(overrides), *override_texts(sections or {})),
        None if config is None else os.fspath(config),
        {port: reference(given) for port, given in (inputs or {}).items()},
        profile,
        first=first,
        until=until,
    )


def reference(given: Input) -> str:
    """An input as the command line names it."""
    return given.ref if isinstance(given, Artifact) else os.fspath(given)


def override_list(overrides: Overrides) -> list[str]:
    """Overrides as texts. RequestError for a text alone, which would be taken for a list of letters."""
    if isinstance(overrides, str):
        raise RequestError(
            "overrides are a list of texts, or a mapping",
            found=repr(overrides),
            hints=(f"overrides=[{overrides!r}]",),
        )
    return override_texts(overrides) if isinstance(overrides, Mapping) else [str(each) for each in overrides]


def override_texts(values: Mapping[str, Any]) -> list[str]:
    """`key=value` for every leaf of nested mappings."""
    return [f"{key}={override_value(value)}" for key, value in _leaves(values, "")]


def _leaves(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def override_value(value: Any) -> str:
    """A value in Hydra's grammar. RequestError for one that it has no form for."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return str(int(value))
    if isinstance(value, float):
        return repr(float(value)) if math.isfinite(value) else str(float(value))
    if isinstance(value, str | os.PathLike):
        return _quoted(os.fspath(value))
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}: {override_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(override_value, value)) + "]"
    raise RequestError(
        "a config holds numbers, texts, lists and mappings",
        expected="a value that a YAML file could have",
        found=f"{value!r} ({type(value).__name__})",
    )


def _quoted(text: str) -> str:
    """Bare where it reads the same; else quoted, where a backslash counts double only before a quote."""
    if _BARE.fullmatch(text) and text.lower() not in _WORDS:
        return text
    escaped = re.sub(r"(\\*)'", lambda found: found[1] * 2 + r"\'", text)
    tail = len(escaped) - len(escaped.rstrip("\\"))
    return "'" + escaped + "\\" * tail + "'"
