"""`reward`: functions of the user's own grade every row. A short way of saying it, moved to `env` before validation."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from nemotron_steps.config.schema import other_names
from nemotron_steps.config.schema.base import Rule, Section, refuse

ENVIRONMENT = "reward_function"
_SETTINGS = f"env.nemo_gym.environments.{ENVIRONMENT}"


Function = Annotated[str, Field(pattern=r"^[^:]+:[A-Za-z_][\w.]*$")]


class RewardFunctionConfig(Section):
    """One function of `reward`."""

    function: Function
    """`FILE.py:NAME`, from the working directory, or `MODULE:NAME`."""
    weight: float = 1.0


Reward = Function | RewardFunctionConfig | tuple[Function | RewardFunctionConfig, ...] | None


def move(values: Any) -> Any:
    """A copy of a config's raw values with what `reward` says at `env`, each file with its path from the root and its
    digest, so that a changed function is another run.

    Raises BrokenRulesError for a file that is not there.
    """
    given = other_names.get(values, "reward")
    if given is None:
        return values
    entries = [_entry(each) for each in (given if isinstance(given, list | tuple) else [given])]
    if not all(entries):
        return values  # validation of its own field says what is wrong
    missing = [path for entry in entries if (path := _file(entry)) is not None and not path.is_file()]
    refuse(
        [
            Rule(
                bool(missing),
                "reward",
                f"reward names the file {', '.join(map(str, missing))}, and there is none",
                ("reward=FILE.py:FUNCTION",),
            )
        ]
    )
    for name, value in {
        "env.should_use_nemo_gym": False,
        "env.environment": ENVIRONMENT,
        f"{_SETTINGS}.functions": [_with_digest(entry) for entry in entries],
    }.items():
        values = other_names.put(values, name, value)
    return other_names.put(values, "reward", None)


def _entry(given: Any) -> dict[str, Any]:
    """A function as a table; empty where it is neither that nor its short form."""
    try:
        return RewardFunctionConfig.model_validate(
            {"function": given} if isinstance(given, str) else given
        ).model_dump()
    except ValidationError:
        return {}


def _file(entry: Mapping[str, Any]) -> Path | None:
    place = entry["function"].rpartition(":")[0]
    return Path(place).expanduser().absolute() if place.endswith(".py") else None


def _with_digest(entry: dict[str, Any]) -> dict[str, Any]:
    path, name = _file(entry), entry["function"].rpartition(":")[2]
    if path is None:
        return entry
    return {**entry, "function": f"{path}:{name}", "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
