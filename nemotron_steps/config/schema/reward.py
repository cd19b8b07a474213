"""`reward`: functions of the user's own grade every row. A short way of saying it, moved to `env` before validation."""

import ast
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field, ValidationError, model_validator

from nemotron_steps.config.names import nearest
from nemotron_steps.config.schema.base import Rule, Section, get_raw, put_raw, raise_if_broken
from nemotron_steps.errors.plugins import bound

ENVIRONMENT = "reward_function"
_SETTINGS = f"env.nemo_gym.environments.{ENVIRONMENT}"


Function = Annotated[str, Field(pattern=r"^[^:]+:[A-Za-z_][\w.]*$")]


class RewardFunctionConfig(Section):
    """One function of `reward`."""

    function: Function
    """`FILE.py:NAME`, from the working directory, or `MODULE:NAME`."""
    weight: float = 1.0


Reward = Function | RewardFunctionConfig | tuple[Function | RewardFunctionConfig, ...] | None


class RewardedConfig(Section):
    """A config whose rows functions of the user's own may grade."""

    GRADERS: ClassVar[Mapping[str, Any]] = {}
    """Keys that would say what grades rows instead → what `reward` sets them to: nothing."""

    reward: Reward = None
    """Functions of the user's own that grade every row: `FILE.py:NAME`, or a list of {function, weight}. Stands for
    `env.environment=reward_function` with its settings, and is null afterwards."""

    @model_validator(mode="before")
    @classmethod
    def _own_reward(cls, values: Any) -> Any:
        return _moved(values, cls.GRADERS)


def _moved(values: Any, graders: Mapping[str, Any]) -> Any:
    """A copy of a config's raw values with what `reward` says at `env`: files by their path from the root.

    Raises BrokenRulesError for a file that does not exist, is not valid Python, or does not define the function.
    """
    given = get_raw(values, "reward")
    if given is None:
        return values
    every = given if isinstance(given, list | tuple) else [given]
    raise_if_broken(_broken(every, every, _unnamed))
    try:
        tables = [{"function": each} if isinstance(each, str) else each for each in every]
        entries = [RewardFunctionConfig.model_validate(each).model_dump() for each in tables]
    except ValidationError:
        return values  # of its own field says what is wrong
    raise_if_broken(_broken([entry["function"] for entry in entries], every, _missing))
    for entry in entries:
        place, _, name = entry["function"].rpartition(":")
        if place.endswith(".py"):
            entry["function"] = f"{_file(place)}:{name}"
    values = put_raw(values, "env.should_use_nemo_gym", False)
    values = put_raw(values, "env.environment", ENVIRONMENT)
    for key, unset in graders.items():
        values = put_raw(values, key, unset)
    return put_raw(put_raw(values, f"{_SETTINGS}.functions", entries), "reward", None)


def _file(place: str) -> Path:
    return Path(place).expanduser().absolute()


def _broken(each: Sequence[Any], every: Sequence[Any], check: Callable[[Any], Rule | None]) -> list[Rule]:
    """What `check` has against each, its hint, which is a function, made an override that keeps the others."""
    found = [(place, rule) for place, one in enumerate(each) if (rule := check(one)) is not None]
    return [replace(rule, hint=rule.hint and _override(rule.hint, every, place)) for place, rule in found]


def _override(function: str, every: Sequence[Any], place: int) -> str:
    """The override by which `function` stands in the place of one of all that are given."""
    if len(every) == 1 and isinstance(every[0], str):
        return f"reward={function}"
    texts = []
    for other, each in enumerate(every):
        name = function if other == place else each.get("function") if isinstance(each, Mapping) else each
        weight = each.get("weight") if isinstance(each, Mapping) else None
        texts.append(str(name) if weight is None else f"{{function:{name},weight:{weight}}}")
    return shlex.quote(f"reward=[{','.join(texts)}]")


def _unnamed(given: Any) -> Rule | None:
    """The rule that a file or module is named together with one of its functions, a colon between them."""
    name = given.get("function") if isinstance(given, Mapping) else given
    if not isinstance(name, str) or ":" in name:
        return None
    if name.endswith(".py"):
        own = _functions(_file(name))
        what = f"reward names the file {name}, and no function of it"
        return Rule("reward", what, f"{name}:{own[0] if own else 'FUNCTION'}")
    module, _, function = name.rpartition(".")
    file = Path(*module.split(".")).with_suffix(".py") if module else None
    meant = f"{file}:{function}" if file is not None and function in _functions(file) else "FILE.py:FUNCTION"
    return Rule("reward", f"reward names no function: {name!r} has no colon before one", meant)


def _missing(function: str) -> Rule | None:
    """The rule that a file is there and defines the function it is named for; it is read, not run. What of the file, or
    of others in its folder, may have been meant is the hint."""
    place, _, name = function.rpartition(":")
    path, first = _file(place), name.partition(".")[0]
    if not place.endswith(".py"):
        return None
    if not path.is_file():
        beside = {file.name: file for file in path.parent.glob("*.py")}
        close = [each for each in nearest(path.name, list(beside)) if first in _functions(beside[each])]
        meant = f"{place.removesuffix(path.name)}{close[0]}:{name}" if close else "FILE.py:FUNCTION"
        return Rule("reward", f"reward names the file {path}, which does not exist", meant)
    try:
        names = bound(path)
    except (SyntaxError, ValueError) as error:
        return Rule("reward", f"reward names {place}, which is not valid Python: {error}")
    if names is None or first in names:
        return None
    own = _functions(path)
    meant = next(iter((*nearest(first, own), *own)), "")
    what = f"reward names the function {first} of {place}, which defines {', '.join(own) or 'none'}"
    return Rule("reward", what, f"{place}:{meant}" if meant else "")


def _functions(path: Path) -> list[str]:
    """The functions that a file defines for others, where reading it tells."""
    try:
        names = bound(path) or {}
    except (OSError, SyntaxError, ValueError):
        return []
    defined = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [name for name, node in names.items() if isinstance(node, defined) and not name.startswith("_")]
