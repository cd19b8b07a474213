"""Environments by name: the built-in ones, those of installed distributions, and which one a row is for.

Third parties register a class under the entry-point group `nemotron_steps.environments`; the entry's name is the
environment's name. Nothing is imported before it is created.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from difflib import get_close_matches
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from nemotron_steps.errors import ConfigError, UnknownNameError, UnsupportedError
from nemotron_steps.errors.plugins import entry_points, load_object

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from nemotron_steps.environments.base import Environment, EnvironmentConfig
    from nemotron_steps.environments.judged.judges import Judge

ENTRY_POINT_GROUP = "nemotron_steps.environments"

_PACKAGE = "nemotron_steps.environments"
BUILT_IN: dict[str, str] = {
    "equivalence_llm_judge": f"{_PACKAGE}.judged.equivalence_llm_judge:EquivalenceLlmJudge",
    "inverse_if": f"{_PACKAGE}.judged.rubrics:InverseIf",
    "jailbreak_detection": f"{_PACKAGE}.judged.safety:JailbreakDetection",
    "lc_niah": f"{_PACKAGE}.text.lc_niah:LcNiah",
    "multichallenge": f"{_PACKAGE}.judged.rubrics:Multichallenge",
    "over_refusal_detection": f"{_PACKAGE}.judged.safety:OverRefusalDetection",
    "terminus_judge": f"{_PACKAGE}.judged.terminus_judge:TerminusJudge",
    "calendar": f"{_PACKAGE}.text.calendar_events:CalendarEvents",
    "code_gen": f"{_PACKAGE}.code.code_gen:CodeGen",
    "genrm_compare": f"{_PACKAGE}.judged.genrm_compare:GenrmCompare",
    "instruction_following": f"{_PACKAGE}.text.instruction_following:InstructionFollowing",
    "math_with_judge": f"{_PACKAGE}.text.math_with_judge:MathWithJudge",
    "math_formal_lean": f"{_PACKAGE}.code.math_formal_lean:MathFormalLean",
    "ns_tools": f"{_PACKAGE}.tools.ns_tools:NsTools",
    "mcqa": f"{_PACKAGE}.text.mcqa:Mcqa",
    "remote": f"{_PACKAGE}.remote.remote:RemoteEnvironment",
    "remote_agent": f"{_PACKAGE}.remote.remote:RemoteAgent",
    "reasoning_gym": f"{_PACKAGE}.text.reasoning_gym:ReasoningGym",
    "single_step_tool_use_with_argument_comparison": f"{_PACKAGE}.tools.single_step_tool_use:SingleStepToolUse",
    "reward_function": f"{_PACKAGE}.custom_reward:RewardFunctionEnvironment",
    "structured_outputs": f"{_PACKAGE}.text.structured_outputs:StructuredOutputs",
    "swerl_gen": f"{_PACKAGE}.code.swerl_gen:SwerlGen",
    "workplace_assistant": f"{_PACKAGE}.tools.workplace_assistant:WorkplaceAssistant",
    "swe_agent": f"{_PACKAGE}.swe.swe_agent:SweAgent",
    "swe_pivot": f"{_PACKAGE}.tools.swe_pivot:SwePivot",
}
"""Environment name → module:class."""

AGENT_ALIASES: dict[str, str] = {
    "genrm": "genrm_compare",
    "jailbreak": "jailbreak_detection",
    "over_refusal": "over_refusal_detection",
    "single_step_tool_use": "single_step_tool_use_with_argument_comparison",
    "terminal_pivot": "terminus_judge",
}
"""Names that public agents use, without suffix, where they differ from the environment's name."""

AGENT_SUFFIXES = ("_simple_agent", "_agent", "_resources_server")
"""Suffixes that public configs append to an environment's name to name its agent."""


def names() -> list[str]:
    """Every environment name known here, sorted."""
    return sorted({*BUILT_IN, *(entry.name for entry in _plugins(tuple(sys.path)))})


def environment_class(name: str) -> type[Environment]:
    """Import the class of an environment."""
    from nemotron_steps.environments.base import Environment

    if name in BUILT_IN:
        module, _, attribute = BUILT_IN[name].partition(":")
        return getattr(importlib.import_module(module), attribute)  # type: ignore[no-any-return]
    entry = plugin(name)
    if entry is None:
        close = get_close_matches(name, names(), n=3)
        raise UnknownNameError(
            f"no environment is named `{name}`",
            expected=f"one of {', '.join(names())}",
            found=name,
            hints=tuple(f"environment name: {match}" for match in close),
        )
    rivals = {each.value: each for each in _plugins(tuple(sys.path)) if each.name == name}
    if len(rivals) > 1:
        packages = sorted(_package(each) for each in rivals.values())
        raise ConfigError(
            f"several installed packages bring an environment `{name}`",
            found=", ".join(packages),
            hints=tuple(f"pip uninstall {package}" for package in packages),
        )
    try:
        loaded = load_object(entry.value)
    except (ImportError, AttributeError) as error:
        raise UnsupportedError(
            f"environment `{name}` of {_package(entry)} cannot be loaded: {error}",
            where=getattr(error, "line", None) or f"entry point {entry.name} = {entry.value}",
            hints=(f"pip uninstall {_package(entry)}",),
        ) from error
    if not (isinstance(loaded, type) and issubclass(loaded, Environment)):
        raise ConfigError(
            f"the plug-in environment `{name}` is not an Environment class",
            where=f"entry point {entry.name} = {entry.value}",
            expected="a subclass of nemotron_steps.environments.base.Environment",
            found=repr(loaded),
        )
    return loaded


def create(
    name: str, config: Mapping[str, Any] | None = None, judges: Mapping[str, Judge] | None = None
) -> Environment:
    """Build an environment from its settings."""
    environment = environment_class(name)(settings_of(name, config), judges or {})
    missing = [role for role in environment.needed_judges() if role not in environment.judges]
    if missing:
        raise ConfigError(
            f"environment `{name}` needs a judge",
            where=f"environment {name}",
            expected=f"judges for: {', '.join(missing)}",
            found=f"judges: {', '.join(sorted(environment.judges)) or 'none'}",
            hints=tuple(f"env.nemo_gym.{role}.responses_api_models.vllm_model.model=PATH" for role in missing),
        )
    return environment


def settings_of(name: str, config: Mapping[str, Any] | None) -> EnvironmentConfig:
    """The validated settings of an environment."""
    from pydantic import ValidationError

    model, where = environment_class(name).config_class, f"env.nemo_gym.environments.{name}"
    try:
        return model.model_validate(dict(config or {}))
    except ValidationError as error:
        problems, hints = [], []
        for item in error.errors():
            key = ".".join(map(str, item["loc"]))
            problems.append(f"{key or '(root)'}: {item['msg']}")
            if item["type"] == "missing":
                hints.append(f"{where}.{key}=VALUE")
            elif item["type"] == "extra_forbidden":
                meant = get_close_matches(key, model.model_fields, n=1, cutoff=0.85)
                hints += [f"{where}.{match}={item['input']}" for match in meant]
            hints += [f"{where}.{hint}" for hint in item.get("ctx", {}).get("hints", ())]
        raise ConfigError(
            f"the settings of environment `{name}` are wrong: {'; '.join(problems)}",
            where=where,
            expected=f"keys: {', '.join(sorted(model.model_fields))}",
            found=", ".join(sorted(config or {})) or "none",
            hints=hints,
        ) from error


def environment_name(agent: str) -> str | None:
    """The environment an agent name stands for, or None: "reasoning_gym_simple_agent", "genrm_simple_agent" (an alias),
    and variants like "structured_outputs_v4", which is of the longest name that it begins or ends with."""
    if agent in BUILT_IN:
        return agent
    known = {name: name for name in names()} | AGENT_ALIASES
    stems = [agent, *(agent.removesuffix(suffix) for suffix in AGENT_SUFFIXES if agent.endswith(suffix))]
    for stem in stems:
        if stem in known:
            return known[stem]
    for stem in stems:
        variants = [name for name in known if stem.startswith(f"{name}_") or stem.endswith(f"_{name}")]
        if variants:
            return known[max(variants, key=len)]
    return None


def _package(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else "an unnamed package"


def plugin(name: str) -> EntryPoint | None:
    """The entry point of an environment that an installed package brings, None if none does."""
    return next((entry for entry in _plugins(tuple(sys.path)) if entry.name == name), None)


@lru_cache(maxsize=8)
def _plugins(search_path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    """Registered plug-ins, looked for once: every row asks."""
    return entry_points(group=ENTRY_POINT_GROUP)
