"""What there is to say of each environment: for `steps env list`, which imports none, and `steps env show`.

A summary is read from an environment's file; settings, ranges and judges come from its class.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemotron_steps.environments.registry import (
    AGENT_ALIASES,
    AGENTS,
    BUILT_IN,
    environment_class,
    names,
    plugin,
    resolve,
    unknown,
)

if TYPE_CHECKING:
    from pydantic import BaseModel

    from nemotron_steps.environments.base import EnvironmentConfig

_DOCSTRING = r'\s*"""(.*?)(?:"""|\n\s*\n)'
_ELSEWHERE = "See the module docstring"
_PACKAGE_FOLDER = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Listed:
    """An environment in a list. `origin` is `built-in`, or the entry point of who brings it; `agents` are names that
    rows may have for it besides `NAME_simple_agent`."""

    name: str
    summary: str
    origin: str
    agents: tuple[str, ...]


@dataclass(frozen=True)
class Setting:
    """One key of `env.nemo_gym.environments.NAME`; the default as JSON has it."""

    name: str
    type: str
    default: Any
    required: bool
    text: str


@dataclass(frozen=True)
class Described:
    """An environment as rows of `asked`, its own name or an agent's, get it: with the settings `preset`. Its
    `reward_range` is None where a setting says it."""

    asked: str
    environment: str
    preset: Mapping[str, Any]
    text: str
    origin: str
    reward_range: tuple[float, float] | None
    required_fields: tuple[str, ...]
    judges: tuple[str, ...]
    judges_groups: bool
    runs_agent: bool
    settings: tuple[Setting, ...]
    agents: tuple[str, ...]


def listed() -> list[Listed]:
    """Every environment by name, none imported."""
    found = []
    for name in names():
        summary, origin = "", getattr(plugin(name), "value", "")
        if name in BUILT_IN:
            summary, origin = _summary(BUILT_IN[name]), "built-in"
        found.append(Listed(name, summary, origin, agents_of(name)))
    return found


def agents_of(environment: str) -> tuple[str, ...]:
    """Names of agents that stand for an environment, besides those that follow from its name."""
    configured = [name for name, agent in AGENTS.items() if agent.environment == environment]
    aliases = [f"{alias}_simple_agent" for alias, name in AGENT_ALIASES.items() if name == environment]
    return tuple(dict.fromkeys([*configured, *aliases]))


def described(name: str) -> Described:
    """All that can be told of what a name of an environment or of an agent stands for."""
    found = resolve(name, {})
    if found is None:
        raise unknown(name)
    environment, preset = found
    from pydantic import ValidationError

    loaded = environment_class(environment)
    config = loaded.config_class
    text = loaded.__doc__ or ""
    if not loaded.__module__.startswith(__package__) or text.startswith(_ELSEWHERE):
        text = inspect.getmodule(loaded).__doc__ or text
    try:
        built = loaded(config.model_validate(preset), {})
    except ValidationError:  # it cannot do without settings
        built = None
    return Described(
        asked=name,
        environment=environment,
        preset=preset,
        text=inspect.cleandoc(text),
        origin="built-in" if environment in BUILT_IN else f"{loaded.__module__}:{loaded.__qualname__}",
        reward_range=built.reward_range if built is not None else None,
        required_fields=("responses_create_params.input", *loaded.required_fields),
        judges=built.needed_judges() if built is not None else (),
        judges_groups=loaded.judges_groups,
        runs_agent=loaded.runs_agent,
        settings=_settings(config),
        agents=agents_of(environment),
    )


def _summary(reference: str) -> str:
    """The first sentence of a class's docstring or its module's, `name:` left out. The file is read, not imported."""
    module, _, name = reference.partition(":")
    source = _PACKAGE_FOLDER.joinpath(*module.split(".")[1:]).with_suffix(".py").read_text("utf-8")
    own = re.search(rf"^class {name}\(.*?\):{_DOCSTRING}", source, re.DOTALL | re.MULTILINE)
    found = own if own and not own[1].startswith(_ELSEWHERE) else re.match(_DOCSTRING, source, re.DOTALL)
    text = " ".join(found[1].split()) if found else ""
    head, colon, rest = text.partition(": ")
    return rest if colon and " " not in head.split(" (")[0] else text


def _settings(config: type[EnvironmentConfig]) -> tuple[Setting, ...]:
    from pydantic_core import to_jsonable_python

    texts, settings = field_texts(config), []
    for name, field in config.model_fields.items():
        kind, required = str(field.annotation).replace("typing.", ""), field.is_required()
        kind = field.annotation.__name__ if isinstance(field.annotation, type) else kind
        default = None if required else field.get_default(call_default_factory=True)
        settings.append(Setting(name, kind, to_jsonable_python(default, fallback=str), required, texts.get(name, "")))
    return tuple(settings)


def field_texts(model: type[BaseModel]) -> dict[str, str]:
    """The string below each field of a model and of those that it extends."""
    texts: dict[str, str] = {}
    for each in reversed(model.__mro__):
        if each.__module__.startswith("pydantic") or each is object:
            continue
        (body,) = ast.parse(textwrap.dedent(inspect.getsource(each))).body
        assert isinstance(body, ast.ClassDef)
        for pair in zip(body.body, body.body[1:], strict=False):
            match pair:
                case ast.AnnAssign(target=ast.Name(id=field)), ast.Expr(value=ast.Constant(value=text)):
                    texts[field] = " ".join(str(text).split())
    return texts
