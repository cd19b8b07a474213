"""The built-in environments keep to what environments of other packages are held to."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from nemotron_steps.environments.base import Response
from nemotron_steps.environments.registry import BUILT_IN
from nemotron_steps.environments.responses import ToolCall
from nemotron_steps.testing import environment
from nemotron_steps.testing.environment_subject import EnvironmentSubject
from nemotron_steps.testing.suite import Examination, State
from tests.environments.cases import CASES, SINGLE, STEP_1, action

MARK = "striped"


class Attentive:
    """A judge for whom the answer with a word in it is right, whichever is asked for."""

    async def complete(self, messages: Sequence[dict[str, str]], **sampling: float) -> str:
        if MARK in json.dumps(list(messages)):
            return '[[A=B]] [[SAFE]] [[YES]] [[COMPLIED]] {"result": "PASS"}'
        return '[[A!=B]] [[UNSAFE]] [[NO]] [[REFUSED]] {"result": "FAIL"}'


def called(row: dict[str, Any]) -> Response:
    calls = row["ground_truth"] if "ground_truth" in row else [row["expected_action"]]
    return Response("", tool_calls=[ToolCall(call["name"], call["arguments"], "c") for call in calls])


def boxed(row: dict[str, Any]) -> str:
    return f"\\boxed{{{row['expected_answer']}}}"


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


EVENT = {"event_id": 0, "event_name": "x", "start_time": "10am", "duration": 60}
ZEBRA = {"instruction_id_list": ["keywords:existence"], "kwargs": [{"keywords": ["zebra"]}]}
ENVIRONMENTS: dict[str, tuple[dict[str, Any], str | Callable[[dict[str, Any]], Any]]] = {
    "calendar": ({}, json.dumps([EVENT])),
    "equivalence_llm_judge": ({"question": "r", "expected_answer": "b"}, f"It is {MARK}."),
    "instruction_following": (ZEBRA, "<<zebra>>"),
    "inverse_if": ({"rubric": [{"id": "1", "criteria": "d"}]}, f"It is {MARK}."),
    "jailbreak_detection": ({"adversarial_prompt": "q"}, f"It is {MARK}."),
    "lc_niah": ({"expected_answer": '["b"]'}, lambda row: f"Final Answer: {row['expected_answer']}"),
    "math_with_judge": ({"expected_answer": "8"}, boxed),
    "mcqa": ({"expected_answer": "B"}, boxed),
    "multichallenge": ({"rubric": [{"question": "r", "pass_criteria": "YES"}]}, f"It is {MARK}."),
    "ns_tools": ({"expected_answer": "8"}, boxed),
    "over_refusal_detection": ({"safe_prompt": "q"}, f"It is {MARK}."),
    "reasoning_gym": ({"answer": "8"}, lambda row: f"<answer>{row['answer']}</answer>"),
    SINGLE: (action("f", {"x": 2}), called),
    "structured_outputs": ({}, '[{"a": "x", "n": 1}]'),
    "swe_pivot": (action("bash", {"command": "ls src"}), called),
    "terminus_judge": (
        {"expected_answer": json.dumps({**STEP_1, "explanation": "c"})},
        lambda row: row["expected_answer"],
    ),
    "workplace_assistant": (mailing("Bye"), called),
}
"""Environment → what a second row has other than that of `CASES`, and the right answer: a text, or made of a row."""

ROWS = {"workplace_assistant": mailing("Hello")} | {
    case.environment: case.row for case in reversed(CASES) if case.label != "knights_knaves"
}
IN_PROCESSES = {"importing_it_is_light"}
"""Checks in processes of their own, of what other tests ask of every environment."""
WITH_HELPERS = {"lc_niah", "math_with_judge", "ns_tools", "reasoning_gym", "structured_outputs"}
"""These start helper processes, which the kit would do a hundred times: it looks at their rows and settings, and
test_hostile_answers at what they do with answers."""
OF_ROWS = ("settings_are_strict", "it_is_documented", "rows_are_accepted")


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_a_built_in_environment_keeps_to_the_rules(name: str):
    change, answer = ENVIRONMENTS[name]
    judges = dict.fromkeys(("judge_model", "safety_model"), Attentive())
    without_judge = name in ("math_with_judge", "ns_tools")
    config = {"should_use_judge": False, "library_verifier_timeout_seconds": 1.0} if without_judge else {}
    rows = [ROWS[name], {**ROWS[name], **change}]
    subject = EnvironmentSubject(name, rows, answer if callable(answer) else lambda row: answer, config, judges)
    checks = OF_ROWS if name in WITH_HELPERS else environment.SUITE.checks
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
