from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from nemotron_steps.environments.agents import AGENTS, resolve
from nemotron_steps.environments.base import Response, Session, ToolCall
from nemotron_steps.environments.environment_set import EnvironmentSet
from nemotron_steps.environments.registry import create
from nemotron_steps.errors import ConfigError, DataError, UnknownNameError, UnsupportedError
from nemotron_steps.steps.data_prep.prompt_work import EnvironmentChecks

SINGLE = "single_step_tool_use_with_argument_comparison"

PUBLIC_AGENTS = {
    "calendar_simple_agent": "calendar",
    "code_gen_simple_agent": "code_gen",
    "equivalence_llm_judge_simple_agent": "equivalence_llm_judge",
    "lc_judge_simple_agent": "equivalence_llm_judge",
    "genrm_simple_agent": "genrm_compare",
    "genrm_simple_agent_reasoning_off": "genrm_compare",
    "instruction_following_simple_agent": "instruction_following",
    "inverse_if_simple_agent": "inverse_if",
    "jailbreak_detection_simple_agent": "jailbreak_detection",
    "jailbreak_engagement_with_disclaimer": "jailbreak_detection",
    "jailbreak_refusal_with_explanation": "jailbreak_detection",
    "jailbreak_hard_refusal_no_redirection": "jailbreak_detection",
    "jailbreak_hard_refusal_with_helplines": "jailbreak_detection",
    "math_formal_lean_refinement_agent": "math_formal_lean",
    "math_with_judge_simple_agent": "math_with_judge",
    "mcqa_simple_agent": "mcqa",
    "multichallenge_simple_agent": "multichallenge",
    "ns_tools_simple_agent": "ns_tools",
    "over_refusal_detection_simple_agent": "over_refusal_detection",
    "xstest_eval_agent": "over_refusal_detection",
    "reasoning_gym_simple_agent": "reasoning_gym",
    f"search_pivot_{SINGLE}_agent": SINGLE,
    f"{SINGLE}_agent": SINGLE,
    f"swe_pivot_{SINGLE}_agent": SINGLE,
    f"toolcall_schema_{SINGLE}_agent": SINGLE,
    "structured_outputs_simple_agent": "structured_outputs",
    "swerl_gen_simple_agent": "swerl_gen",
    "workplace_assistant_simple_agent": "workplace_assistant",
}
"""Every agent of the published recipes but those that need a server of their own."""


def row(agent: str, **fields: Any) -> dict[str, Any]:
    return {"responses_create_params": {"input": "Do it."}, "agent_ref": {"name": agent}, **fields}


@pytest.mark.parametrize(("agent", "environment"), sorted(PUBLIC_AGENTS.items()))
def test_every_published_agent_leads_to_its_environment(agent: str, environment: str) -> None:
    found = resolve(agent, {})
    assert found is not None and found[0] == environment


@pytest.mark.parametrize("agent", sorted(AGENTS))
def test_the_settings_of_every_agent_are_accepted_by_its_environment(agent: str) -> None:
    if AGENTS[agent].needs is None:
        judges = dict.fromkeys(("judge_model", "safety_model"), object())
        create(AGENTS[agent].environment, AGENTS[agent].settings, judges)  # type: ignore[arg-type]


def tool_row(agent: str) -> dict[str, Any]:
    arguments = json.dumps({"query": "one two three four five six"})
    return row(agent, expected_action={"type": "function_call", "name": "search", "arguments": arguments})


def test_agents_of_one_environment_keep_their_own_settings_side_by_side() -> None:
    environments = EnvironmentSet({}, {})
    answer = Response("", tool_calls=[ToolCall("search", json.dumps({"query": "one two x y z w"}), "c")])
    rewards = {}
    for prefix in ("", "search_pivot_", "toolcall_schema_", "swe_pivot_"):
        task = tool_row(f"{prefix}{SINGLE}_agent")
        environment = environments.route(task, "f:1")
        environment.check_row(task, "f:1")
        rewards[prefix] = asyncio.run(environment.verify(task, answer, Session())).reward
    assert rewards == {"": 1.0, "search_pivot_": 0.0, "toolcall_schema_": 1.0, "swe_pivot_": 1.0}
    same = environments.get(f"{SINGLE}_agent") is environments.get(f"toolcall_schema_{SINGLE}_agent")
    assert same and environments.get(f"{SINGLE}_agent") is not environments.get(f"swe_pivot_{SINGLE}_agent")


def test_a_message_row_of_the_swe_pivot_agent_is_graded() -> None:
    task = row(f"swe_pivot_{SINGLE}_agent", expected_action={"type": "message", "content": "done"})
    environment = EnvironmentSet({}, {}).route(task, "f:1")
    environment.check_row(task, "f:1")
    assert asyncio.run(environment.verify(task, Response("finished"), Session())).reward == 1.0


def test_settings_of_an_agent_beat_those_of_its_environment_and_those_beat_the_presets() -> None:
    options = {
        SINGLE: {"word_count_similarity_threshold": 0.2, "floating_point_comparison_threshold": 0.5},
        f"search_pivot_{SINGLE}_agent": {"word_count_similarity_threshold": 0.4},
    }
    found = {agent: resolve(agent, options) for agent in (f"search_pivot_{SINGLE}_agent", f"swe_pivot_{SINGLE}_agent")}
    thresholds = {agent: settings["word_count_similarity_threshold"] for agent, (_, settings) in found.items()}  # type: ignore[misc]
    assert thresholds == {f"search_pivot_{SINGLE}_agent": 0.4, f"swe_pivot_{SINGLE}_agent": 0.2}
    assert all(settings["floating_point_comparison_threshold"] == 0.5 for _, settings in found.values())  # type: ignore[misc]


def test_agents_can_be_added() -> None:
    options = {"my_quiz": {"environment": "mcqa", "grading_mode": "lenient_answer_colon"}}
    task = row("my_quiz", options=[{"A": "x"}, {"B": "y"}], expected_answer="B")
    environment = EnvironmentSet(options, {}).route(task, "f:1")
    assert asyncio.run(environment.verify(task, Response("Answer: B"), Session())).reward == 1.0
    with pytest.raises(UnknownNameError):
        EnvironmentSet({"my_quiz": {"environment": "quiz"}}, {}).route(task, "f:1")
    with pytest.raises(ConfigError):
        EnvironmentSet({"my_quiz": {"environment": ["mcqa"]}}, {}).route(task, "f:1")
    with pytest.raises(DataError):
        EnvironmentSet({}, {}).route(task, "f:1")


@pytest.mark.parametrize("agent", ["swe_agents_train", "swe_agents_val"])
def test_an_agent_that_needs_a_server_says_so_until_it_has_one(agent: str) -> None:
    with pytest.raises(UnsupportedError, match="agent server") as caught:
        EnvironmentSet({}, {}).route(row(agent), "f:1")
    assert f"{agent}.url=" in caught.value.hints[0]
    options = {agent: {"environment": "remote_agent", "url": "http://127.0.0.1:1"}}
    assert EnvironmentSet(options, {}).route(row(agent), "f:1").name == "remote_agent"


def test_judges_are_those_of_the_agents_own_settings() -> None:
    options = {"quiet": {"environment": "math_with_judge", "should_use_judge": False}}
    environments = EnvironmentSet(options, dict.fromkeys(("judge_model", "safety_model"), object()))  # type: ignore[arg-type]
    environments.get("quiet")
    assert environments.needed_judges() == set()
    for agent in ("lc_judge_simple_agent", "xstest_eval_agent", "mcqa"):
        environments.get(agent)
    assert environments.needed_judges() == {"judge_model", "safety_model"}


def test_data_preparation_takes_rows_of_agents_that_only_a_run_can_set_up(tmp_path: Path) -> None:
    check = EnvironmentChecks()
    check("f:1", row("swe_agents_train"))
    check("f:2", row("remote"))
    check("f:3", row("workplace_assistant_simple_agent", ground_truth=[]))
    with pytest.raises(DataError):
        check("f:4", row("nobody"))
    with pytest.raises(DataError, match="expected_action"):
        check("f:5", row(f"swe_pivot_{SINGLE}_agent"))
