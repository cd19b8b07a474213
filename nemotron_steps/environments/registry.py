"""Environments by name: the built-in ones, those of installed distributions, and which one a row's agent stands for.

Third parties register a class under the entry-point group `nemotron_steps.environments`; the entry's name is the
environment's name. Nothing is imported before it is created.

Several agents may use one environment with different settings, side by side in one run. The settings of an agent,
later ones first: `env.nemo_gym.environments.AGENT`, `env.nemo_gym.environments.ENVIRONMENT`, those of AGENTS, the
environment's defaults. A key `environment` under a new name adds an agent.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from nemotron_steps.errors import ConfigError, DataError, UnknownNameError, UnsupportedError, show_line
from nemotron_steps.errors.plugins import entry_points, load_object

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from nemotron_steps.environments.base import Environment, EnvironmentConfig
    from nemotron_steps.environments.judged.judges import Judge

ENTRY_POINT_GROUP = "nemotron_steps.environments"
SECTION = "env.nemo_gym.environments"
ENVIRONMENT_KEY = "environment"

Options = Mapping[str, Mapping[str, Any]]

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


@dataclass(frozen=True)
class Agent:
    """What an agent's name stands for."""

    environment: str
    settings: Mapping[str, Any] = field(default_factory=dict)


_SINGLE_STEP = "single_step_tool_use_with_argument_comparison"
_THRESHOLDS = {"": 0.1, "search_pivot_": 0.3, "toolcall_schema_": 0.1, "swe_pivot_": 0.0}
_JAILBREAK = (
    "detection_simple_agent",
    "engagement_with_disclaimer",
    "refusal_with_explanation",
    "hard_refusal_no_redirection",
    "hard_refusal_with_helplines",
)

_RUBRICS = {"judge_responses_create_params": {"temperature": 0.7, "top_p": 0.8, "max_output_tokens": 8192}}
_SAFETY = {"judge_responses_create_params": {"temperature": 0.0, "max_output_tokens": 1024}, "max_steps": 1}

AGENTS: dict[str, Agent] = {
    **{
        f"{prefix}{_SINGLE_STEP}_agent": Agent(_SINGLE_STEP, {"word_count_similarity_threshold": threshold})
        for prefix, threshold in _THRESHOLDS.items()
    },
    "equivalence_llm_judge_simple_agent": Agent(
        "equivalence_llm_judge",
        {
            "extraction_length_threshold": None,
            "check_full_generation_on_fail": False,
            "reward_if_full_generation_succeeds": 0.0,
        },
    ),
    "lc_judge_simple_agent": Agent(
        "equivalence_llm_judge", {"question_extract_regex": r"^QUESTION:\s*(.*)$|</text>\n\n(.*)$"}
    ),
    "nl2bash_equivalency_simple_agent": Agent(
        "equivalence_llm_judge",
        {
            "response_extract_regex": r"Answer:\s*```(?:\w+)?\s*([\s\S]*?)\s*```(?=[\s\S]*$)",
            "check_twice_swap": True,
            "use_per_record_regex": False,
        },
    ),
    "genrm_simple_agent_reasoning_off": Agent("genrm_compare", {"chat_template_kwargs": {"enable_thinking": False}}),
    "inverse_if_simple_agent": Agent("inverse_if", _RUBRICS),
    "multichallenge_simple_agent": Agent("multichallenge", _RUBRICS),
    **{f"jailbreak_{name}": Agent("jailbreak_detection", _SAFETY) for name in _JAILBREAK},
    "over_refusal_detection_simple_agent": Agent("over_refusal_detection", _SAFETY),
    "xstest_eval_agent": Agent("over_refusal_detection", _SAFETY),
    "workplace_assistant_simple_agent": Agent("workplace_assistant", {"max_steps": 6}),
    "ns_tools_simple_agent": Agent("ns_tools", {"max_steps": 50, "tool_timeout_s": 10.0}),
    "math_formal_lean_refinement_agent": Agent("math_formal_lean", {"max_corrections": 2, "lean_timeout_s": 30.0}),
    "swerl_gen_simple_agent": Agent("swerl_gen", {"sandbox_timeout": 900.0, "relaxed_formatting": False}),
    # Served elsewhere, or `environment: swe_agent`, the harness of this package.
    "swe_agents_train": Agent("remote_agent"),
    "swe_agents_val": Agent("remote_agent"),
}
"""Public agents whose name does not say their environment, or who have settings of their own. Others follow from the
name: see environment_name."""

AGENT_ALIASES: dict[str, str] = {
    "genrm": "genrm_compare",
    "jailbreak": "jailbreak_detection",
    "over_refusal": "over_refusal_detection",
    "single_step_tool_use": "single_step_tool_use_with_argument_comparison",
    "terminal_pivot": "terminus_judge",
}

AGENT_SUFFIXES = ("_simple_agent", "_agent", "_resources_server")


@lru_cache(maxsize=8)
def _plugins(search_path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    """Registered plug-ins, looked for once: every row asks."""
    return entry_points(group=ENTRY_POINT_GROUP)


def plugin(name: str) -> EntryPoint | None:
    """The entry point of an environment that an installed package brings, None if none does."""
    return next((entry for entry in _plugins(tuple(sys.path)) if entry.name == name), None)


def names() -> list[str]:
    """Every environment name known here, sorted."""
    return sorted({*BUILT_IN, *(entry.name for entry in _plugins(tuple(sys.path)))})


def unknown(name: str) -> UnknownNameError:
    """What to say of a name that is neither an environment's nor an agent's."""
    close = get_close_matches(name, [*names(), *AGENTS], n=3, cutoff=0.4)
    return UnknownNameError(
        f"no environment or agent is named `{name}`",
        expected=f"one of {', '.join(names())}",
        found=name,
        hints=tuple(f"steps env show {match}" for match in close) or ("steps env list",),
    )


def _package(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else "an unnamed package"


def environment_class(name: str) -> type[Environment]:
    """Import the class of an environment."""
    from nemotron_steps.environments.base import Environment

    if name in BUILT_IN:
        module, _, attribute = BUILT_IN[name].partition(":")
        return getattr(importlib.import_module(module), attribute)  # type: ignore[no-any-return]
    entry = plugin(name)
    if entry is None:
        raise unknown(name)
    package = _package(entry)
    found = {each.value: _package(each) for each in _plugins(tuple(sys.path)) if each.name == name}
    if len(rivals := sorted(found.values())) > 1:
        what = f"several installed packages bring an environment `{name}`"
        raise ConfigError(what, found=", ".join(rivals), hints=tuple(f"pip uninstall {each}" for each in rivals))
    where = f"entry point {entry.name} = {entry.value}"
    try:
        loaded = load_object(entry.value)
    except (ImportError, AttributeError) as error:
        raise UnsupportedError(
            f"environment `{name}` of {package} cannot be loaded: {error}",
            where=getattr(error, "line", None) or where,
            hints=(f"pip uninstall {package}",),
        ) from error
    if not (isinstance(loaded, type) and issubclass(loaded, Environment)):
        raise ConfigError(
            f"the plug-in environment `{name}` is not an Environment class",
            where=where,
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

    model, where = environment_class(name).config_class, f"{SECTION}.{name}"
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
    known = {name: name for name in names()} | AGENT_ALIASES
    stems = [agent, *(agent.removesuffix(suffix) for suffix in AGENT_SUFFIXES if agent.endswith(suffix))]
    if found := next((known[stem] for stem in stems if stem in known), None):
        return found
    for stem in stems:
        variants = [name for name in known if stem.startswith(f"{name}_") or stem.endswith(f"_{name}")]
        if variants:
            return known[max(variants, key=len)]
    return None


def stands_for(name: str) -> str | None:
    """The environment that an agent's or an environment's name stands for without being configured; None for a
    misspelt one: a rule that takes variants of a name would give it the environment and not the agent's settings."""
    if name in AGENTS:
        return AGENTS[name].environment
    return environment_name(name) if misspelt(name) is None else None


def misspelt(name: str) -> str | None:
    """The known agent or environment whose misspelling a name is: nearly the same, in as many words."""
    known = _known()
    close = get_close_matches(name.casefold(), known, n=1, cutoff=0.93)
    return close[0] if close and name not in known and close[0].count("_") == name.count("_") else None


def _known() -> list[str]:
    """Every name of an environment or of an agent that follows no rule for variants."""
    stems = [*names(), *AGENT_ALIASES]
    return [*AGENTS, *stems, *(stem + suffix for stem in stems for suffix in AGENT_SUFFIXES)]


def agent_of(row: Mapping[str, Any], where: str) -> str:
    """The agent that a row names."""
    reference = row.get("agent_ref")
    agent = reference.get("name") if isinstance(reference, Mapping) else None
    if agent is None:
        raise DataError(
            "row names no agent, and the run names no default environment",
            where=f"{where} field agent_ref.name",
            expected='"agent_ref": {"type": "responses_api_agents", "name": ...}',
            found="no agent_ref.name",
            hints=("env.should_use_nemo_gym=false env.environment=NAME", *show_line(where)),
        )
    return str(agent)


def resolve(name: str, options: Options) -> tuple[str, dict[str, Any]] | None:
    """(environment, its settings) of an agent's or an environment's name; None if there is none of that name."""
    own = dict(options.get(name, {}))
    chosen = own.pop(ENVIRONMENT_KEY, None)
    if chosen is not None and not isinstance(chosen, str):
        raise ConfigError(
            "an agent's environment must be a name",
            where=f"{SECTION}.{name}.{ENVIRONMENT_KEY}",
            expected=f"one of {', '.join(names())}",
            found=repr(chosen),
        )
    if chosen is not None:
        return chosen, _merged(options.get(chosen, {}), own)
    environment = stands_for(name)
    if environment is None:
        return None
    preset = AGENTS[name].settings if name in AGENTS else {}
    settings = _merged(preset, options.get(environment, {}))
    return environment, settings if name == environment else _merged(settings, own)


def refuse_unread_settings(options: Options) -> None:
    """Refuse settings under a name that stands for nothing: no environment would read them."""
    for name, settings in options.items():
        if ENVIRONMENT_KEY in settings or stands_for(name) is not None:
            continue
        nearest = misspelt(name) or next(iter(get_close_matches(name, _known(), n=1)), "NAME")
        meant = [f"{SECTION}.{nearest}.{key}={value}" for key, value in settings.items()]
        raise ConfigError(
            f"there are settings for `{name}`, but no environment or agent has that name",
            where=f"{SECTION}.{name}",
            expected=f"{nearest}, or another one of {', '.join(names())}",
            found=", ".join(settings) or "no setting",
            hints=(*meant, f"{SECTION}.{name}.{ENVIRONMENT_KEY}=NAME   # for a new agent"),
        )


def unknown_agent(agent: str, where: str, hints: tuple[str, ...] | None = None) -> DataError:
    """The error of a row whose agent stands for no environment."""
    meant, nearest = misspelt(agent), ""
    if hints is None:
        likely = (meant and stands_for(meant)) or [*get_close_matches(agent, names(), n=1), "NAME"][0]
        hints = (f"env.should_use_nemo_gym=false env.environment={likely}",)
        if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_-]*", agent):  # it can be part of an override's key
            hints = (f"{SECTION}.{agent}.environment={likely}", *hints)
    if meant is not None:  # with the settings of the agent that was meant
        hints = (f'"agent_ref": {{"name": "{meant}"}}   # in the rows', *hints)
        nearest = f"{meant}, which is the nearest name, or "
    return DataError(
        "row names an agent that no environment here serves",
        where=f"{where} field agent_ref.name",
        expected=f"{nearest}one of {', '.join(names())}, alone or followed by _simple_agent",
        found=agent,
        hints=(*hints, *show_line(where)),
    )


def _merged(settings: Mapping[str, Any], later: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with later ones over them, key by key in groups as well (`judge_responses_create_params`)."""
    merged = dict(settings)
    for key, value in later.items():
        before = merged.get(key)
        if isinstance(before, Mapping) and isinstance(value, Mapping):
            value = _merged(before, value)
        merged[key] = value
    return merged
