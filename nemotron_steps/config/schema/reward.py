"""`reward`: functions of the user's own grade every row. A short way of saying it, moved to `env` before validation."""

import ast
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field, ValidationError, model_validator

from nemotron_steps.config.names import nearest
from nemotron_steps.config.schema.base import BrokenRulesError, Rule, Section, get_raw, put_raw
from nemotron_steps.errors.plugins import names_in

ENVIRONMENT = "reward_function"

Function = Annotated[str, Field(pattern=r"^[^:]+:[A-Za-z_][\w.]*$")]


class RewardFunctionConfig(Section):
    """One function of `reward`."""

    function: Function
    """`FILE.py:NAME`, from the working directory, or `MODULE:NAME`."""
    weight: float = 1.0


class RewardedConfig(Section):
    """A config whose rows functions of the user's own may grade."""

    GRADERS: ClassVar[Mapping[str, Any]] = {}
    """Keys that would say what grades rows instead → what `reward` sets them to: nothing."""

    reward: Function | RewardFunctionConfig | tuple[Function | RewardFunctionConfig, ...] | None = None
    """Functions of the user's own that grade every row: `FILE.py:NAME`, or a list of {function, weight}. Stands for
    `env.environment=reward_function` with its settings, and is null afterwards."""

    @model_validator(mode="before")
    @classmethod
    def _own_reward(cls, values: Any) -> Any:
        """What `reward` says goes to `env`, files by their path from the root."""
        given = get_raw(values, "reward")
        if given is None:
            return values
        tables = [
            {"function": each} if isinstance(each, str) else each
            for each in (given if isinstance(given, list | tuple) else [given])
        ]
        names = [each.get("function") for each in tables if isinstance(each, Mapping)]
        slips = [rule for name in names if isinstance(name, str) and (rule := _slip(name, alone=given == name))]
        if slips:
            raise BrokenRulesError(slips)
        try:
            entries = [RewardFunctionConfig.model_validate(each).model_dump() for each in tables]
        except ValidationError:
            return values  # of its own field says what is wrong
        for entry in entries:
            place, _, name = entry["function"].rpartition(":")
            if place.endswith(".py"):
                entry["function"] = f"{_file(place)}:{name}"
        moved = {"env.should_use_nemo_gym": False, "env.environment": ENVIRONMENT, "reward": None, **cls.GRADERS}
        moved[f"env.nemo_gym.environments.{ENVIRONMENT}.functions"] = entries
        for key, value in moved.items():
            values = put_raw(values, key, value)
        return values


def _file(place: str) -> Path:
    return Path(place).expanduser().absolute()


def _slip(function: str, alone: bool) -> Rule | None:
    """What is wrong with `FILE.py:NAME` or `MODULE:NAME`: the file is read, not run. `alone`: it is all of `reward`."""
    place, _, name = function.rpartition(":")
    if function.endswith(".py"):
        place, name = function, ""
    fix = "reward=FILE.py:FUNCTION" if alone else ""
    if not place:
        return Rule("reward", f"reward must be FILE.py:FUNCTION or MODULE:FUNCTION, not {function!r}", fix)
    if not place.endswith(".py"):
        return None
    path = _file(place)
    if not path.is_file():
        return Rule("reward", f"reward names the file {path}, which does not exist", fix)
    try:
        names, statements = names_in(path), ast.parse(path.read_bytes()).body
    except (SyntaxError, ValueError) as error:
        return Rule("reward", f"reward names {place}, which is not valid Python: {error}")
    if names is None or name.partition(".")[0] in names:
        return None
    functions = [each.name for each in statements if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
    own = [each for each in functions if not each.startswith("_")]
    close = (*nearest(name, own), *own)
    what = f"reward needs a function of {place}, which defines {', '.join(own) or 'none'}, not {name!r}"
    return Rule("reward", what, f"reward={place}:{close[0]}" if close and alone else "")
