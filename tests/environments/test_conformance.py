"""The built-in environments keep to what environments of other packages are held to."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from nemotron_steps.environments.base import Response
from nemotron_steps.environments.registry import BUILT_IN
from nemotron_steps.environments.responses import ToolCall
from nemotron_steps.testing import environment
from nemotron_steps.testing.environment_subject import EnvironmentSubject
from nemotron_steps.testing.suite import Examination, State
from tests.environments.cases import CALENDAR, PROMPT, STEP_1
from tests.environments.test_gym_rows import MARK, Attentive


@dataclass(frozen=True)
class Kept:
    """What the kit is given for an environment.

    Attributes:
        rows: fields of two rows, beside the prompt.
        answer: row → the right answer.
        config: settings.
    """

    rows: tuple[dict[str, Any], dict[str, Any]]
    answer: Callable[[dict[str, Any]], Any]
    config: dict[str, Any] = field(default_factory=dict)


def called(row: dict[str, Any]) -> Response:
    action = row["expected_action"]
    return Response("", tool_calls=[ToolCall(action["name"], action["arguments"], "c")])


def calls(name: str, *arguments: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    return tuple(
        {"expected_action": {"type": "function_call", "name": name, "arguments": json.dumps(each)}}
        for each in arguments
    )


def marked(row: dict[str, Any]) -> str:
    return f"It is {MARK}."


def boxed(row: dict[str, Any]) -> str:
    return f"\\boxed{{{row['expected_answer']}}}"


def sent(row: dict[str, Any]) -> Response:
    return Response("", tool_calls=[ToolCall(call["name"], call["arguments"], "c") for call in row["ground_truth"]])


def mailing(subject: str) -> dict[str, Any]:
    mail = {"recipient": "ann@example.com", "subject": subject, "body": "See you."}
    properties = {name: {"type": "string"} for name in mail}
    tool = {"name": "email_send_email", "parameters": {"type": "object", "properties": properties}}
    return {
        "responses_create_params": {
            "input": "Write to Ann.",
            "tools": [{"type": "function", "description": "Sends a mail.", **tool}],
        },
        "ground_truth": [{"name": "email_send_email", "arguments": json.dumps(mail)}],
    }


OPTIONS = [{"A": "one"}, {"B": "two"}]
EVENT = {"event_id": 0, "event_name": "x", "start_time": "10am", "duration": 60}
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
ENVIRONMENTS: dict[str, Kept] = {
    "calendar": Kept(({"exp_cal_state": CALENDAR}, {"exp_cal_state": CALENDAR}), lambda row: json.dumps([EVENT])),
    "equivalence_llm_judge": Kept(
        ({"question": "q", "expected_answer": "a"}, {"question": "r", "expected_answer": "b"}), marked
    ),
    "instruction_following": Kept(
        (
            {"instruction_id_list": ["startend:end_checker"], "kwargs": [{"end_phrase": "the end"}]},
            {"instruction_id_list": ["keywords:existence"], "kwargs": [{"keywords": ["zebra"]}]},
        ),
        lambda row: "A zebra, the end",
    ),
    "inverse_if": Kept(
        ({"rubric": [{"id": "1", "criteria": "c"}]}, {"rubric": [{"id": "1", "criteria": "d"}]}), marked
    ),
    "jailbreak_detection": Kept(({"adversarial_prompt": "p"}, {"adversarial_prompt": "q"}), marked),
    "lc_niah": Kept(
        ({"expected_answer": '["a"]'}, {"expected_answer": '["b"]'}),
        lambda row: f"Final Answer: {row['expected_answer']}",
    ),
    "math_with_judge": Kept(
        ({"question": "q", "expected_answer": "7"}, {"question": "q", "expected_answer": "8"}),
        boxed,
        {"should_use_judge": False, "library_verifier_timeout_seconds": 1.0},
    ),
    "mcqa": Kept(({"options": OPTIONS, "expected_answer": "A"}, {"options": OPTIONS, "expected_answer": "B"}), boxed),
    "multichallenge": Kept(
        (
            {"rubric": [{"question": "q", "pass_criteria": "YES"}]},
            {"rubric": [{"question": "r", "pass_criteria": "YES"}]},
        ),
        marked,
    ),
    "ns_tools": Kept(
        ({"question": "q", "expected_answer": "7"}, {"question": "q", "expected_answer": "8"}),
        boxed,
        {"should_use_judge": False, "library_verifier_timeout_seconds": 1.0},
    ),
    "over_refusal_detection": Kept(({"safe_prompt": "p"}, {"safe_prompt": "q"}), marked),
    "reasoning_gym": Kept(
        (
            {"question": "q", "answer": "7", "metadata": {"source_dataset": "basic_arithmetic"}},
            {"question": "q", "answer": "8", "metadata": {"source_dataset": "basic_arithmetic"}},
        ),
        lambda row: f"<answer>{row['answer']}</answer>",
    ),
    "single_step_tool_use_with_argument_comparison": Kept(calls("f", {"x": 1}, {"x": 2}), called),
    "structured_outputs": Kept(
        (
            {"schema_str": json.dumps(SCHEMA), "schema_type": "json"},
            {"schema_str": json.dumps({**SCHEMA, "title": "t"}), "schema_type": "json"},
        ),
        lambda row: '{"n": 1}',
    ),
    "swe_pivot": Kept(calls("bash", {"command": "ls src"}, {"command": "grep -rn x src/a.py"}), called),
    "terminus_judge": Kept(
        (
            {"expected_answer": json.dumps(STEP_1), "metadata": {"harness": "terminus_1"}},
            {"expected_answer": json.dumps({**STEP_1, "explanation": "c"}), "metadata": {"harness": "terminus_1"}},
        ),
        lambda row: row["expected_answer"],
    ),
    "workplace_assistant": Kept((mailing("Hello"), mailing("Bye")), sent),
}


IN_PROCESSES = {"importing_it_is_light", "env_show_renders"}
"""Checks in processes of their own, of what other tests ask of every environment."""
WITH_HELPERS = {"math_with_judge", "ns_tools", "reasoning_gym", "structured_outputs"}
"""These start helper processes, which the kit would do a hundred times: it looks at their rows and settings, and
test_hostile_answers at what they do with answers."""
ROWS = ("settings_are_strict", "it_is_documented", "rows_are_accepted")


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_a_built_in_environment_keeps_to_the_rules(name: str):
    kept = ENVIRONMENTS[name]
    rows = [{**PROMPT, **row} for row in kept.rows]
    judges = dict.fromkeys(("judge_model", "genrm_model", "safety_model"), Attentive())
    subject = EnvironmentSubject(name, rows, kept.answer, kept.config, judges)
    checks = ROWS if name in WITH_HELPERS else environment.SUITE.checks
    outcomes = Examination(environment.SUITE, subject).outcomes([each for each in checks if each not in IN_PROCESSES])
    assert {check: outcome.text for check, outcome in outcomes.items() if outcome.state is State.FAILED} == {}
    if name in WITH_HELPERS - {"ns_tools"}:  # which grades as math_with_judge does
        environment.typed_answers_are_judged(subject)


ELSEWHERE = {
    *("code_gen", "genrm_compare", "math_formal_lean", "remote", "remote_agent"),
    *("reward_function", "swe_agent", "swerl_gen"),
}
"""Those that need a server, a sandbox or a function: their own files grade with them."""


def test_every_other_built_in_environment_has_rows_here() -> None:
    assert set(BUILT_IN) - ELSEWHERE == set(ENVIRONMENTS)


@pytest.mark.parametrize("name", sorted(ELSEWHERE))
def test_an_environment_that_needs_a_server_or_a_sandbox_is_documented_all_the_same(name: str):
    examination = Examination(environment.SUITE, EnvironmentSubject(name, [], str))
    outcomes = examination.outcomes(["is_registered", "it_is_documented"])
    assert {check: outcome.text for check, outcome in outcomes.items() if outcome.state is not State.PASSED} == {}
