import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from nemotron_steps.environments.base import Response, Session, ToolCall
from nemotron_steps.environments.environment_set import EnvironmentSet
from nemotron_steps.environments.registry import misspelt, resolve
from nemotron_steps.errors import ConfigError, DataError, UnknownNameError
from nemotron_steps.steps.data_prep.rl_prep import EnvironmentChecks

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


SLIPS = {
    "mcqa_simple_agnet": "mcqa_simple_agent",
    "Genrm_simple_agent": "genrm_simple_agent",
    "genrm_simple_agent_reasoning_of": "genrm_simple_agent_reasoning_off",
    "swe_agents_trian": "swe_agents_train",
}


@pytest.mark.parametrize(("agent", "meant"), SLIPS.items())
def test_a_misspelt_agent_is_told_with_the_one_it_is_nearest_to(agent: str, meant: str, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps(row(agent)) + "\n")
    for check in (
        lambda: EnvironmentSet({agent: {"max_steps": 3}}, {}).route(row(agent), f"{rows}:1"),
        lambda: EnvironmentChecks()(f"{rows}:1", row(agent)),
    ):
        with pytest.raises(DataError, match="no environment here serves") as caught:
            check()
        assert str(caught.value.expected).startswith(f"{meant}, which is the nearest name, or one of ")
        assert json.loads(f"{{{caught.value.hints[0].partition('   # ')[0]}}}")["agent_ref"]["name"] == meant
    assert EnvironmentSet({agent: {"environment": "mcqa"}}, {}).route(row(agent), "f:1").name == "mcqa"


@pytest.mark.parametrize(
    "agent", ["swe_pivot_tool_simulation_agent", "my_mcqa_agent", "structured_outputs_v4_simple_agent"]
)
def test_a_variant_with_words_of_its_own_is_no_slip(agent: str) -> None:
    assert misspelt(agent) is None
    assert resolve(agent, {}) is not None


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
    with pytest.raises(ConfigError, match="url: Field required") as caught:
        EnvironmentSet({}, {}).route(row(agent), "f:1")
    assert "env.nemo_gym.environments.remote_agent.url=VALUE" in caught.value.hints
    assert EnvironmentSet({agent: {"environment": "swe_agent"}}, {}).route(row(agent), "f:1").name == "swe_agent"
    options = {agent: {"environment": "remote_agent", "url": "http://127.0.0.1:1"}}
    assert EnvironmentSet(options, {}).route(row(agent), "f:1").name == "remote_agent"


def test_data_preparation_takes_rows_of_agents_that_only_a_run_can_set_up(tmp_path: Path) -> None:
    check = EnvironmentChecks()
    check("f:1", row("swe_agents_train"))
    check("f:2", row("remote"))
    check("f:3", row("workplace_assistant_simple_agent", ground_truth=[]))
    with pytest.raises(DataError):
        check("f:4", row("nobody"))
    with pytest.raises(DataError, match="expected_action"):
        check("f:5", row(f"swe_pivot_{SINGLE}_agent"))


SAFETY = {"judge_responses_create_params": {"temperature": 0.0, "max_output_tokens": 1024}, "max_steps": 1}
RUBRICS = {
    "judge_responses_create_params": {"temperature": 0.7, "top_p": 0.8, "max_output_tokens": 8192},
    "aggregation_mode": "mean",
}
PUBLISHED_SETTINGS: dict[str, dict[str, Any]] = {
    "lc_judge_simple_agent": {
        "check_twice_swap": False,
        "reward_if_swap_fails": 0.0,
        "question_extract_regex": "^QUESTION:\\s*(.*)$|</text>\\n\\n(.*)$",
        "response_extract_regex": None,
    },
    "nl2bash_equivalency_simple_agent": {
        "response_extract_regex": "Answer:\\s*```(?:\\w+)?\\s*([\\s\\S]*?)\\s*```(?=[\\s\\S]*$)",
        "check_twice_swap": True,
        "reward_if_swap_fails": 0.0,
        "use_per_record_regex": False,
        "extraction_length_threshold": 120,
        "check_full_generation_on_fail": True,
        "reward_if_full_generation_succeeds": 0.5,
    },
    "genrm_simple_agent_reasoning_off": {"chat_template_kwargs": {"enable_thinking": False}},
    "multichallenge_simple_agent": RUBRICS,
    "jailbreak_hard_refusal_with_helplines": SAFETY,
    "over_refusal_detection_simple_agent": SAFETY
    | {"reward_if_complied": 1.0, "reward_if_refused": 0.0, "reward_if_unclear": 0.5},
    "math_formal_lean_refinement_agent": {"max_corrections": 2, "lean_timeout_s": 30.0},
    "ns_tools_simple_agent": {"max_steps": 50, "tool_timeout_s": 10.0},
    f"{SINGLE}_agent": {"word_count_similarity_threshold": 0.1},
    f"search_pivot_{SINGLE}_agent": {"word_count_similarity_threshold": 0.3},
    f"swe_pivot_{SINGLE}_agent": {"word_count_similarity_threshold": 0.0},
    f"toolcall_schema_{SINGLE}_agent": {"word_count_similarity_threshold": 0.1},
    "swerl_gen_simple_agent": {"sandbox_timeout": 900.0, "relaxed_formatting": False},
    "workplace_assistant_simple_agent": {"max_steps": 6},
}
"""Some agents → what the published configs set for them, under the names that the settings have here. Not here: where
servers are and how many processes they have, judges' prompts and labels (ours are our own)."""


@pytest.mark.parametrize("agent", sorted(PUBLISHED_SETTINGS))
def test_every_published_setting_of_an_agent_is_in_force_by_its_name_alone(agent: str) -> None:
    judges = dict.fromkeys(("judge_model", "safety_model", "genrm_model"), object())
    settings = EnvironmentSet({}, judges).get(agent).config.model_dump()  # type: ignore[arg-type]

    def in_force(wanted: dict[str, Any], found: dict[str, Any]) -> None:
        for key, value in wanted.items():
            if isinstance(value, dict) and value:
                in_force(value, found[key])
            else:
                assert found[key] == value, key

    in_force(PUBLISHED_SETTINGS[agent], settings)


def row_of(agent: str | None, **more: Any) -> dict[str, Any]:
    named = {} if agent is None else {"agent_ref": {"type": "responses_api_agents", "name": agent}}
    return {"responses_create_params": {"input": "hi"}, **named, **more}


MCQA = {"options": [{"A": "x"}], "expected_answer": "A"}


def test_rows_are_checked_by_who_grades_them() -> None:
    environments = EnvironmentSet({}, {})
    calendar = row_of("calendar", exp_cal_state={})
    options = {"named": {"environment": "mcqa"}}
    named = EnvironmentSet(options, {})
    assert named.check_rows([(row_of("named", **MCQA), "f:1"), (calendar, "f:2")]) == {"mcqa", "calendar"}
    assert environments.check_rows([(row_of("calendar", **MCQA), "f:1")], environment="mcqa") == {"mcqa"}
    with pytest.raises(DataError, match="f:7"):
        environments.check_rows([(row_of("calendar", exp_cal_state=3), "f:7")])


def test_the_policys_endpoint_is_offered_where_an_environment_can_use_it_and_settings_go_first() -> None:
    options = {"mine": {"environment": "remote_agent", "url": "http://h:1", "policy_model_name": "own"}}
    told = EnvironmentSet(options, {})
    told.offer_policy("http://127.0.0.1:9/v1", "policy")
    config: Any = told.get("mine").config
    assert (config.policy_base_url, config.policy_model_name) == ("http://127.0.0.1:9/v1", "own")
    assert "policy_base_url" not in type(told.get("mcqa").config).model_fields
