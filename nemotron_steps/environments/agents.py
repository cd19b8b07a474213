"""Which environment, with which settings, a row's agent stands for.

Several agents may use one environment with different settings, side by side in one run. The settings of an agent, later
ones first: `env.nemo_gym.environments.AGENT`, `env.nemo_gym.environments.ENVIRONMENT`, those here, the environment's
defaults. A key `environment` under a new name adds an agent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nemotron_steps.environments.registry import environment_name, names, unknown_agent
from nemotron_steps.errors import ConfigError, DataError, UnsupportedError, show_line

Options = Mapping[str, Mapping[str, Any]]
"""`env.nemo_gym.environments`: settings by the name of an environment or of an agent."""

ENVIRONMENT_KEY = "environment"


@dataclass(frozen=True)
class Agent:
    """What an agent's name stands for. `needs` says why it stands for nothing here without being configured."""

    environment: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    needs: str | None = None


def _single_step(threshold: float) -> Agent:
    return Agent("single_step_tool_use_with_argument_comparison", {"word_count_similarity_threshold": threshold})


_SWE_AGENT = Agent(
    "remote_agent", needs="an agent server with the repositories' container images, which is not part of this package"
)
_SINGLE_STEP = "single_step_tool_use_with_argument_comparison_agent"

_RUBRIC_JUDGE = {"temperature": 0.7, "top_p": 0.8, "max_output_tokens": 8192}
_SAFETY = {"judge_responses_create_params": {"temperature": 0.0, "max_output_tokens": 1024}, "max_steps": 1}


def _jailbreak(*names: str) -> dict[str, Agent]:
    return {f"jailbreak_{name}": Agent("jailbreak_detection", _SAFETY) for name in names}


AGENTS: dict[str, Agent] = {
    _SINGLE_STEP: _single_step(0.1),
    f"search_pivot_{_SINGLE_STEP}": _single_step(0.3),
    f"toolcall_schema_{_SINGLE_STEP}": _single_step(0.1),
    f"swe_pivot_{_SINGLE_STEP}": _single_step(0.0),
    "equivalence_llm_judge_simple_agent": Agent(
        "equivalence_llm_judge",
        {
            "check_twice_swap": False,
            "reward_if_swap_fails": 0.0,
            "use_per_record_regex": True,
            "extraction_length_threshold": None,
            "check_full_generation_on_fail": False,
            "reward_if_full_generation_succeeds": 0.0,
        },
    ),
    "lc_judge_simple_agent": Agent(
        "equivalence_llm_judge",
        {
            "question_extract_regex": r"^QUESTION:\s*(.*)$|</text>\n\n(.*)$",
            "check_twice_swap": False,
            "reward_if_swap_fails": 0.0,
        },
    ),
    "nl2bash_equivalency_simple_agent": Agent(
        "equivalence_llm_judge",
        {
            "response_extract_regex": r"Answer:\s*```(?:\w+)?\s*([\s\S]*?)\s*```(?=[\s\S]*$)",
            "check_twice_swap": True,
            "reward_if_swap_fails": 0.0,
            "use_per_record_regex": False,
            "extraction_length_threshold": 120,
            "check_full_generation_on_fail": True,
            "reward_if_full_generation_succeeds": 0.5,
        },
    ),
    "genrm_simple_agent_reasoning_off": Agent("genrm_compare", {"chat_template_kwargs": {"enable_thinking": False}}),
    "inverse_if_simple_agent": Agent(
        "inverse_if", {"judge_responses_create_params": _RUBRIC_JUDGE, "aggregation_mode": "mean"}
    ),
    "multichallenge_simple_agent": Agent(
        "multichallenge", {"judge_responses_create_params": _RUBRIC_JUDGE, "aggregation_mode": "mean"}
    ),
    **_jailbreak(
        "detection_simple_agent",
        "engagement_with_disclaimer",
        "refusal_with_explanation",
        "hard_refusal_no_redirection",
        "hard_refusal_with_helplines",
    ),
    "over_refusal_detection_simple_agent": Agent("over_refusal_detection", _SAFETY),
    "xstest_eval_agent": Agent("over_refusal_detection", _SAFETY),
    "workplace_assistant_simple_agent": Agent("workplace_assistant", {"max_steps": 6}),
    "ns_tools_simple_agent": Agent("ns_tools", {"max_steps": 50, "tool_timeout_s": 10.0}),
    "math_formal_lean_refinement_agent": Agent("math_formal_lean", {"max_corrections": 2, "lean_timeout_s": 30.0}),
    "swerl_gen_simple_agent": Agent("swerl_gen", {"sandbox_timeout": 900.0, "relaxed_formatting": False}),
    "swe_agents_train": _SWE_AGENT,
    "swe_agents_val": _SWE_AGENT,
}
"""Public agents whose name does not say their environment, or who have settings of their own. Others follow from the
name: see registry.environment_name."""


def agent_of(row: Mapping[str, Any], where: str) -> str:
    """The agent that a row names.

    Raises:
        DataError: it names none.
    """
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
    """(environment, its settings) of an agent's or an environment's name; None if there is none of that name.

    Raises:
        UnsupportedError: the agent needs what is not configured. ConfigError: `environment` is no name.
    """
    own = dict(options.get(name, {}))
    chosen = own.pop(ENVIRONMENT_KEY, None)
    if chosen is not None and not isinstance(chosen, str):
        raise ConfigError(
            "an agent's environment must be a name",
            where=f"env.nemo_gym.environments.{name}.{ENVIRONMENT_KEY}",
            expected=f"one of {', '.join(names())}",
            found=repr(chosen),
        )
    agent = AGENTS.get(name)
    if chosen is not None:
        return chosen, _merged(options.get(chosen, {}), own)
    if agent is not None and agent.needs is not None:
        raise UnsupportedError(
            f"the agent `{name}` needs {agent.needs}",
            where=f"env.nemo_gym.environments.{name}",
            hints=(
                f"env.nemo_gym.environments.{name}.environment={agent.environment} "
                f"env.nemo_gym.environments.{name}.url=http://HOST:PORT",
                f"env.nemo_gym.environments.{name}.environment=swe_agent   # the harness of this package",
            ),
        )
    environment = agent.environment if agent is not None else environment_name(name)
    if environment is None:
        return None
    settings = _merged(agent.settings if agent is not None else {}, options.get(environment, {}))
    return environment, settings if name == environment else _merged(settings, own)


def _merged(settings: Mapping[str, Any], later: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with later ones over them, key by key in groups as well (`judge_responses_create_params`)."""
    merged = dict(settings)
    for key, value in later.items():
        before = merged.get(key)
        if isinstance(before, Mapping) and isinstance(value, Mapping):
            value = _merged(before, value)
        merged[key] = value
    return merged


def route(row: Mapping[str, Any], where: str, options: Options | None = None) -> str:
    """Environment name of a row.

    Raises:
        DataError: it names no agent, or one that stands for no environment. UnsupportedError: as resolve.
    """
    agent = agent_of(row, where)
    found = resolve(agent, options or {})
    if found is None:
        raise unknown_agent(agent, where)
    return found[0]
