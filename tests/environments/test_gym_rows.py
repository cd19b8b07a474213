"""Rows in the shape of NeMo-Gym's data sets, with the fields beside those that are read: each kind is accepted by the
environment that its agent stands for, is a prompt, and rewards the right answer more than a wrong one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from nemotron_steps.environments.base import Environment
from nemotron_steps.environments.environment_set import EnvironmentSet
from nemotron_steps.environments.responses import Response, ToolCall
from nemotron_steps.rows.layouts import read_request
from nemotron_steps.steps.data_prep.rl_prep import EnvironmentChecks
from tests.environments.test_agents import SINGLE

MARK = "striped"


class Attentive:
    """A judge for whom the answer with a word in it is right, whichever is asked for."""

    async def complete(self, messages: Sequence[dict[str, str]], **sampling: float) -> str:
        asked = json.dumps(list(messages))
        if '"ranking"' in asked or "response_1" in asked:
            first, second = asked.find(MARK), asked.find("Plain")
            scores = (5, 1, 1) if 0 <= first < second else (1, 5, 6)
            return json.dumps(dict(zip(("score_1", "score_2", "ranking"), scores, strict=True)))
        if MARK in asked:
            return '[[A=B]] [[SAFE]] [[YES]] [[COMPLIED]] {"result": "PASS"}'
        return '[[A!=B]] [[UNSAFE]] [[NO]] [[REFUSED]] {"result": "FAIL"}'


@dataclass(frozen=True)
class Kind:
    """Rows of one kind.

    Attributes:
        agent: of the data set's config, where the rows name none.
        environment: that it stands for.
        right, wrong: answers.
    """

    agent: str
    environment: str
    row: dict[str, Any]
    right: str | Response
    wrong: str | Response


def asks(*texts: str, system: str | None = None, **request: Any) -> dict[str, Any]:
    """A request of turns that begin and end with the user's."""
    turns = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]
    system_turn = [{"content": system, "role": "system"}] if system is not None else []
    return {"responses_create_params": {"input": [*system_turn, *turns], **request}}


def tool(name: str, /, **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return {"type": "function", "name": name, "description": "Does it.", "parameters": schema, "strict": True}


def called(name: str, /, **arguments: Any) -> Response:
    return Response("", tool_calls=[ToolCall(name, json.dumps(arguments), "c")])


def action(name: str, /, **arguments: Any) -> dict[str, Any]:
    return {"type": "function_call", "name": name, "arguments": json.dumps(arguments)}


UNSET = dict.fromkeys(
    ("background", "include", "instructions", "max_output_tokens", "metadata", "model", "prompt", "reasoning", "text")
)
"""What a recorded request has besides."""
RECORDED: list[dict[str, Any]] = [
    {"content": "Help the customer.", "role": "system", "type": "message"},
    {"content": "I won. I am S901, with W123.", "role": "user", "type": "message"},
    {
        "encrypted_content": None,
        "id": "rs_1",
        "summary": [{"text": "Who?", "type": "summary_text"}],
        "type": "reasoning",
    },
    {
        "arguments": '{"user_id": "S901"}',
        "call_id": "call_1",
        "id": "fc_1",
        "name": "authenticate_user",
        "status": "completed",
        "type": "function_call",
    },
    {"call_id": "call_1", "id": "o_1", "output": '{"ok": true}', "status": "completed", "type": "function_call_output"},
    {
        "content": [{"annotations": [], "logprobs": None, "text": "Thank you.", "type": "output_text"}],
        "id": "msg_1",
        "role": "assistant",
        "status": "completed",
        "type": "message",
    },
    {"content": "And now?", "role": "user", "type": "message"},
]
SINGLE_STEP = {
    "responses_create_params": {
        **UNSET,
        "input": RECORDED,
        "tools": [tool("authenticate_user", user_id={"type": "string"})],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "stream": None,
    }
}
STEP_1 = {
    "state_analysis": "A prompt.",
    "explanation": "Look.",
    "commands": [{"keystrokes": "pip list | grep oauth\n", "is_blocking": True, "timeout_sec": 5}],
    "is_task_complete": False,
}
STEP_2 = {
    "analysis": "A prompt.",
    "plan": "1. Look",
    "commands": [{"keystrokes": "pip list | grep oauth\n", "duration": 1.0}],
    "task_complete": False,
}
EVENT = {"event_id": 0, "event_name": "Planning", "start_time": "10am", "duration": 60}
MAIL = {"recipient": "ann@example.com", "subject": "Hello", "body": "See you."}
EXTRACTION = {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}}
SAGES = {
    "knight": "sage",
    "knave": "fool",
    "a_knight": "a sage",
    "a_knave": "a fool",
    "Knight": "Sage",
    "Knave": "Fool",
}

KINDS: dict[str, Kind] = {
    "calendar": Kind(
        "calendar_simple_agent",
        "calendar",
        {
            **asks("Add Planning.", "Added.", "Before 11:45am.", system="Keep the calendar.", tools=[]),
            "exp_cal_state": {
                "0": {
                    "event_id": 0,
                    "duration": 60,
                    "constraint": "between 10am and 11:45am",
                    "min_time": "10:00",
                    "max_time": "16:00",
                }
            },
        },
        json.dumps([EVENT]),
        json.dumps([{**EVENT, "start_time": "3pm"}]),
    ),
    "instruction_following": Kind(
        "instruction_following_simple_agent",
        "instruction_following",
        {
            "id": 17616,
            "instruction_id_list": ["length_constraints:nth_paragraph_first_word", "last_word:last_word_answer"],
            "prompt": "Tell it.",
            "kwargs": [{"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "crash"}, {"last_word": "contest"}],
            **asks("Tell it.", tools=[], parallel_tool_calls=False),
        },
        "One.\n\nCrash into the contest",
        "One.\n\nTwo.",
    ),
    "reasoning_gym": Kind(
        "reasoning_gym_simple_agent",
        "reasoning_gym",
        {
            **asks("Sages and fools."),
            "question": "Sages and fools.",
            "answer": "Zoey is a fool, and Riley is a sage.",
            "metadata": {
                "source_dataset": "knights_knaves",
                "source_index": 0,
                "statements": [["lying", 1], ["or", ["telling-truth", 0], ["lying", 1]]],
                "solution": [False, True],
                "names": ["Zoey", "Riley"],
                "knight_knave_terms": SAGES,
                "difficulty": {"n_people": 2, "depth_constraint": 2, "width_constraint": 2},
            },
        },
        "<answer>Zoey is a fool, and Riley is a sage.</answer>",
        "<answer>Zoey is a sage, and Riley is a sage.</answer>",
    ),
    "single step, a call": Kind(
        f"{SINGLE}_agent",
        SINGLE,
        {**SINGLE_STEP, "expected_action": action("authenticate_user", user_id="GROOM2024")},
        called("authenticate_user", user_id="GROOM2024"),
        called("authenticate_user", user_id="BRIDE2024"),
    ),
    "single step, a message": Kind(
        f"toolcall_schema_{SINGLE}_agent",
        SINGLE,
        {**SINGLE_STEP, "expected_action": {"type": "message", "content": "\n\nWhich event?"}},
        "Which event?",
        called("authenticate_user", user_id="S901"),
    ),
    "structured_outputs": Kind(
        "structured_outputs_v4_simple_agent",
        "structured_outputs",
        {
            **asks("A village.", system="No prose.", tools=[tool("response_tool_8", extraction=EXTRACTION)]),
            "schema_str": json.dumps(EXTRACTION),
            "schema_type": "json",
            "response_mode": "tool_call",
            "problem_type": "direct_tool_call",
            "schema_repr": "tool",
            "source_format": "csv",
            "tool_choice": "auto",
            "parallel_tool_calls": True,
            "tool_name": "response_tool_8",
            "tool_schema_mode": "extraction_wrapper",
            "tool_payload_key": "extraction",
            "tool_union_mode": None,
            "num_tools": 16,
            "has_distractors": True,
            "agent_ref": {"type": "responses_api_agents", "name": "structured_outputs_v4_simple_agent"},
        },
        called("response_tool_8", extraction={"name": "Dizer Kola"}),
        called("response_tool_8", name="Dizer Kola"),
    ),
    "swe_pivot": Kind(
        "swe_pivot_tool_simulation_agent",
        "swe_pivot",
        {
            "uuid": "example_1",
            "agent_ref": {"type": "responses_api_agents", "name": "swe_pivot_tool_simulation_agent"},
            **asks("In /p/foo.py, fix it.", system="You are a coding agent."),
            "expected_action": action("execute_bash", command="grep -rn total /p"),
            "pivot_tags": ["P1"],
            "metadata": {"category": "search"},
        },
        called("execute_bash", command="grep -rn total /p"),
        called("execute_bash", command="rm -rf /"),
    ),
    **{
        f"terminus_judge, {harness}": Kind(
            "terminus_judge_simple_agent",
            "terminus_judge",
            {
                **asks("You are an AI assistant tasked with solving command-line tasks."),
                "expected_answer": json.dumps(step, indent=2),
                "uuid": "f2271e25-1",
                "metadata": {"category": "first_round", "harness": harness},
                "agent_ref": {"type": "responses_api_agents", "name": "terminus_judge_simple_agent"},
            },
            json.dumps(step),
            json.dumps({**step, "commands": [{**step["commands"][0], "keystrokes": "rm -rf / # Plain\n"}]}),  # type: ignore[index]
        )
        for harness, step in (("terminus_1", STEP_1), ("terminus_2", STEP_2))
    },
    "workplace_assistant": Kind(
        "workplace_assistant_simple_agent",
        "workplace_assistant",
        {
            "id": 0,
            **asks(
                "Write to Ann.",
                system="Today is Thursday.",
                tools=[tool("email_send_email", **{key: {"type": "string"} for key in MAIL})],
                parallel_tool_calls=False,
                temperature=1.0,
            ),
            "ground_truth": [{"name": "email_send_email", "arguments": json.dumps(MAIL)}],
            "category": "workplace_assistant_email",
            "environment_name": "workplace_assistant",
        },
        called("email_send_email", **MAIL),
        called("email_send_email", **{**MAIL, "body": "No."}),
    ),
}


def environment_of(kind: Kind) -> Environment:
    judges = dict.fromkeys(("judge_model", "genrm_model", "safety_model"), Attentive())
    named = {"agent_ref": {"type": "responses_api_agents", "name": kind.agent}}
    return EnvironmentSet({}, judges).route({**named, **kind.row}, "rows.jsonl:1")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", KINDS)
def test_a_row_of_nemo_gym_is_accepted_by_the_environment_of_its_agent(name: str) -> None:
    kind = KINDS[name]
    row = {"agent_ref": {"type": "responses_api_agents", "name": kind.agent}, **kind.row}
    assert environment_of(kind).name == kind.environment
    EnvironmentChecks()("rows.jsonl:1", row)
    environment_of(kind).check_row(row, "rows.jsonl:1")
    messages = read_request(row, "row").messages
    assert messages[-1]["role"] == "user" and all(isinstance(message["content"], str) for message in messages)


@pytest.mark.parametrize("name", KINDS)
def test_the_right_answer_to_a_row_of_nemo_gym_is_rewarded_more_than_a_wrong_one(name: str) -> None:
    kind = KINDS[name]
    environment = environment_of(kind)
    answers = [Response.from_text(each) if isinstance(each, str) else each for each in (kind.right, kind.wrong)]

    async def rewards() -> list[float | None]:
        await environment.start()
        try:
            sessions = [await environment.seed(kind.row) for _ in answers]
            for answer, session in zip(answers, sessions, strict=True):
                for call in answer.tool_calls if name == "workplace_assistant" else ():
                    await environment.call_tool(session, call.name, json.loads(call.arguments))
            return [each.reward for each in await environment.verify_group(kind.row, answers, sessions)]
        finally:
            await environment.close()

    right, wrong = asyncio.run(rewards())
    assert right is not None and wrong is not None and right > wrong
