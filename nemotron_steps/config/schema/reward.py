"""`reward`: functions of the user's own grade every row. A short way of saying it, moved to `env` before validation."""

from __future__ import annotations

import ast
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from nemotron_steps.config.names import nearest
from nemotron_steps.config.schema.base import Rule, Section, get_raw, put_raw, raise_if_broken

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
    """A copy of a config's raw values with what `reward` says at `env`: files by their path from the root.

    Raises BrokenRulesError for a file that does not exist, is not valid Python, or does not define the function.
    """
    given = get_raw(values, "reward")
    if given is None:
        return values
    every = given if isinstance(given, list | tuple) else [given]
    raise_if_broken(_broken(every, every, _unnamed))
    entries = [_entry(each) for each in every]
    if not all(entries):
        return values  # validation of its own field says what is wrong
    raise_if_broken(_broken(entries, every, _missing))
    raise_if_broken(_broken(entries, every, _unbound))
    for name, value in {
        "env.should_use_nemo_gym": False,
        "env.environment": ENVIRONMENT,
        f"{_SETTINGS}.functions": [_placed(entry) for entry in entries],
    }.items():
        values = put_raw(values, name, value)
    return put_raw(values, "reward", None)


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
        own = _functions(Path(name).expanduser())
        what = f"reward names the file {name}, and no function of it"
        return Rule("reward", what, f"{name}:{own[0] if own else 'FUNCTION'}")
    module, _, function = name.rpartition(".")
    file = Path(*module.split(".")).with_suffix(".py") if module else None
    meant = f"{file}:{function}" if file is not None and function in _functions(file) else "FILE.py:FUNCTION"
    return Rule("reward", f"reward names no function: {name!r} has no colon before one", meant)


def _missing(entry: Mapping[str, Any]) -> Rule | None:
    """The rule that a file is there; files of the same folder that may have been meant are its hints."""
    path = _file(entry)
    if path is None or path.is_file():
        return None
    place, _, name = entry["function"].rpartition(":")
    beside = {file.name: file for file in path.parent.glob("*.py")}
    close = [each for each in nearest(path.name, list(beside)) if name.partition(".")[0] in _functions(beside[each])]
    folder = place.removesuffix(path.name)
    meant = f"{folder}{close[0]}:{name}" if close else "FILE.py:FUNCTION"
    return Rule("reward", f"reward names the file {path}, which does not exist", meant)


def _functions(path: Path) -> list[str]:
    """The functions that a file defines for others; none if it is not valid Python."""
    try:
        body = ast.parse(path.read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return []
    defined = (node.name for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return [name for name in defined if not name.startswith("_")]


def _unbound(entry: Mapping[str, Any]) -> Rule | None:
    """The rule that a file defines the function it is named for; it is read, not run."""
    path, name = _file(entry), entry["function"].rpartition(":")[2].partition(".")[0]
    if path is None:
        return None
    shown = entry["function"].rpartition(":")[0]
    try:
        body = ast.parse(path.read_bytes()).body
    except (SyntaxError, ValueError) as error:
        return Rule("reward", f"reward names {shown}, which is not valid Python: {error}")
    bound = _bound(body)
    if bound is None or name in bound:
        return None
    own = _functions(path)
    close = next(iter((*nearest(name, own), *own)), None)
    what = f"reward names the function {name} of {shown}, which defines {', '.join(own) or 'none'}"
    return Rule("reward", what, f"{shown}:{close}" if close else "")


def _bound(body: list[ast.stmt]) -> set[str] | None:
    """The names that a module's statements bind; None where only running it tells."""
    names: set[str] = set()
    for node in body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                names.add(node.name)
            case ast.Import() | ast.ImportFrom() if all(alias.name != "*" for alias in node.names):
                names.update(alias.asname or alias.name.partition(".")[0] for alias in node.names)
            case ast.Assign() if all(isinstance(target, ast.Name) for target in node.targets):
                names.update(target.id for target in node.targets if isinstance(target, ast.Name))
            case ast.Expr():
                pass
            case _:
                return None
    return names


def _placed(entry: dict[str, Any]) -> dict[str, Any]:
    path = _file(entry)
    name = entry["function"].rpartition(":")[2]
    return entry if path is None else {**entry, "function": f"{path}:{name}"}
