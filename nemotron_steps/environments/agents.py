"""Which environment, with which settings, a row's agent stands for.

Several agents may use one environment with different settings, side by side in one run. The settings of an agent, later
ones first: `env.nemo_gym.environments.AGENT`, `env.nemo_gym.environments.ENVIRONMENT`, those here, the environment's
defaults. A key `environment` under a new name adds an agent.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher, get_close_matches
from typing import Any

from nemotron_steps.environments.registry import AGENT_ALIASES, AGENT_SUFFIXES, environment_name, names
from nemotron_steps.errors import ConfigError, DataError, UnsupportedError, show_line

Options = Mapping[str, Mapping[str, Any]]
"""`env.nemo_gym.environments`: settings by the name of an environment or of an agent."""

ENVIRONMENT_KEY = "environment"

_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
"""An agent's name that can be part of an override's key."""

_SLIP = 0.75
"""Likeness from which one word is the other with a slip: `agnet` and `agent`, and not `without` and `with`."""


@dataclass(frozen=True)
class Agent:
    """What an agent's name stands for. `needs` says why it stands for nothing here without being configured."""

    environment: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    needs: str | None = None


_SWE_AGENT = Agent(
    "remote_agent", needs="an agent server with the repositories' container images, which is not part of this package"
)
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
    "swe_agents_train": _SWE_AGENT,
    "swe_agents_val": _SWE_AGENT,
}
"""Public agents whose name does not say their environment, or who have settings of their own. Others follow from the
name: see registry.environment_name."""


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
    environment = stands_for(name)
    if environment is None:
        return None
    settings = _merged(agent.settings if agent is not None else {}, options.get(environment, {}))
    return environment, settings if name == environment else _merged(settings, own)


def stands_for(name: str) -> str | None:
    """The environment that an agent's or an environment's name stands for without being configured; None for a
    misspelt one: a rule that takes variants of a name would give it the environment and not the agent's settings."""
    if name in AGENTS:
        return AGENTS[name].environment
    return environment_name(name) if misspelt(name) is None else None


def misspelt(name: str) -> str | None:
    """The known agent or environment whose misspelling a name is: the same words, each alike, or joined otherwise."""
    known = _known()
    if name in known:
        return None

    def alike(word: str, other: str) -> bool:  # but for a slip; a digit more or less is another word
        if re.sub(r"\D", "", word) != re.sub(r"\D", "", other):
            return False
        return SequenceMatcher(None, word, other, autojunk=False).ratio() >= _SLIP

    for other in get_close_matches(name.casefold(), known, n=5, cutoff=0.8):
        words, others = (re.split(r"[_\W]+", each.casefold()) for each in (name, other))
        if "".join(words) == "".join(others) or (len(words) == len(others) and all(map(alike, words, others))):
            return other
    return None


def refuse_unread_settings(options: Options) -> None:
    """Refuse settings under a name that stands for nothing: no environment would read them."""
    for name, settings in options.items():
        if ENVIRONMENT_KEY in settings or stands_for(name) is not None:
            continue
        nearest = misspelt(name) or next(iter(get_close_matches(name, _known(), n=1)), None)
        section = "env.nemo_gym.environments"
        raise ConfigError(
            f"there are settings for `{name}`, but no environment or agent has that name",
            where=f"{section}.{name}",
            expected=f"{nearest}, which is the nearest name" if nearest else f"one of {', '.join(names())}",
            found=", ".join(settings) or "no setting",
            hints=(
                *(f"{section}.{nearest}.{key}={value}" for key, value in settings.items() if nearest),
                f"{section}.{name}.{ENVIRONMENT_KEY}=NAME   # for a new agent",
            ),
        )


def unknown_agent(agent: str, where: str, hints: Sequence[str] | None = None) -> DataError:
    """The error of a row whose agent stands for no environment."""
    meant = misspelt(agent)
    if hints is None:
        stem = next((agent.removesuffix(suffix) for suffix in AGENT_SUFFIXES if agent.endswith(suffix)), agent)
        likely = (meant and stands_for(meant)) or [*get_close_matches(stem, names(), n=1), "NAME"][0]
        named = (f"env.nemo_gym.environments.{agent}.environment={likely}",) if _KEY.fullmatch(agent) else ()
        hints = (*named, f"env.should_use_nemo_gym=false env.environment={likely}")
    if meant is not None:  # with the settings of the agent that was meant
        hints = (f'"agent_ref": {{"name": "{meant}"}}   # in the rows', *hints)
    nearest = f"{meant}, which is the nearest name, or " if meant is not None else ""
    return DataError(
        "row names an agent that no environment here serves",
        where=f"{where} field agent_ref.name",
        expected=f"{nearest}one of {', '.join(names())}, alone or followed by _simple_agent",
        found=agent,
        hints=(*hints, *show_line(where)),
    )


def _known() -> list[str]:
    """Every name of an environment or of an agent that follows no rule for variants."""
    stems = [*names(), *AGENT_ALIASES]
    return [*AGENTS, *stems, *(stem + suffix for stem in stems for suffix in AGENT_SUFFIXES)]


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
    """Environment name of a row."""
    agent = agent_of(row, where)
    found = resolve(agent, options or {})
    if found is None:
        raise unknown_agent(agent, where)
    return found[0]
