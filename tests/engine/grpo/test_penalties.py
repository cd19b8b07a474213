from __future__ import annotations

import pytest

from nemotron_steps.config.schema.grpo import GrpoConfig
from nemotron_steps.config.schema.policy import ReasoningParserName, ToolParserName
from nemotron_steps.engine.grpo.rewards import (
    Violation,
    find_violations,
    has_invalid_tool_call,
    has_malformed_thinking,
    treatments,
)
from nemotron_steps.engine.rollouts.conversation import FORMAT_KEY, TurnFormat
from tests.engine.engine_samples import rollout

CALL = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'


@pytest.mark.parametrize(
    ("text", "invalid"),
    [
        ("no call at all", False),
        (CALL, False),
        (f"let me look {CALL}{CALL}", False),
        ("<think>should I write <tool_call>?</think> no", False),
        ('<tool_call>{"name": "f", "arguments": {}', True),
        ("<tool_call>not json</tool_call>", True),
        (f"{CALL} and </tool_call>", True),
    ],
)
def test_invalid_tool_calls(text: str, invalid: bool) -> None:
    assert has_invalid_tool_call(text) is invalid


@pytest.mark.parametrize(
    ("parser", "broken", "fine"),
    [
        ("hermes", '<tool_call>{"name": "f"', "<TOOLCALL> <function=f>"),
        ("qwen3_coder", "<function=f><parameter=x>1</parameter></function>", "<TOOLCALL> <|python_tag|>"),
        ("nemotron_json", '<TOOLCALL>[{"name": "f"', "<tool_call> <function=f>"),
        ("llama3_json", "let me see <|python_tag|>f(1)", "<tool_call> <TOOLCALL>"),
    ],
)
def test_an_invalid_call_is_one_in_the_markers_of_the_turns_own_format(
    parser: ToolParserName, broken: str, fine: str
) -> None:
    written = TurnFormat(tool_parser=parser)
    assert has_invalid_tool_call(broken, turn_format=written)
    assert not has_invalid_tool_call(fine, turn_format=written)
    assert not has_invalid_tool_call(broken, turn_format=TurnFormat(tool_parser="none"))
    assert has_invalid_tool_call(fine, fine.split(), written)  # the config's own markers come first


@pytest.mark.parametrize("parser", ["nano_v3", "deepseek_r1"])
@pytest.mark.parametrize(
    ("text", "truncated", "malformed"),
    [
        ("a thought, and the answer: 7", False, True),  # it ended inside the thinking that its template opened
        ("a thought", True, False),
        ("", False, True),
        ("a</think>b", False, False),
        ("<think>a</think>b", False, False),
        ("a</think>b</think>", False, True),
    ],
)
def test_a_turn_ends_the_thinking_that_its_template_began(
    text: str, truncated: bool, malformed: bool, parser: ReasoningParserName
) -> None:
    written = TurnFormat(reasoning_parser=parser)
    assert has_malformed_thinking(text, truncated=truncated, turn_format=written) is malformed
    assert not has_malformed_thinking(text, truncated=truncated, turn_format=TurnFormat(reasoning_parser="none"))


def test_a_rollout_is_judged_in_the_format_it_was_sampled_in() -> None:
    rollouts = [
        rollout(metadata={FORMAT_KEY: ["nano_v3", "nemotron_json"]}),
        rollout(index=1, metadata={FORMAT_KEY: ["qwen3", "hermes"]}),
    ]
    texts = [["no end </think> <TOOLCALL>"], ["no end <TOOLCALL>"]]
    assert [(v.row, v.kind) for v in find_violations(rollouts, texts)] == [(0, Violation.INVALID_TOOL_CALL)]
    unclosed = [["no end"], ["no end"]]
    assert [(v.row, v.kind) for v in find_violations(rollouts, unclosed)] == [(0, Violation.MALFORMED_THINKING)]
    assert find_violations(rollouts, texts, [Violation.INVALID_TOOL_CALL], patterns=()) == []  # the config's: none
    own = find_violations(rollouts, texts, [Violation.INVALID_TOOL_CALL], patterns=("end",))
    assert [v.row for v in own] == [1]  # the other's is in its thinking


@pytest.mark.parametrize(
    ("text", "truncated", "malformed"),
    [
        ("plain", False, False),
        ("<think>a</think>b", False, False),
        ("a</think>b", False, False),  # the template wrote the opening tag
        ("<think>a", True, False),
        ("<think>a", False, True),
        ("</think>a<think>", False, True),
        ("<think>a</think>b</think>", False, True),
        ("<think><think>a</think>", True, True),
    ],
)
def test_malformed_thinking(text: str, truncated: bool, malformed: bool) -> None:
    assert has_malformed_thinking(text, truncated=truncated) is malformed


@pytest.mark.parametrize(
    ("keys", "call", "thinking"),
    [
        ({}, "off", "off"),
        ({"invalid_tool_call_advantage": -5, "malformed_thinking_advantage": -7}, -5, -7),
        ({"penalize_invalid_tool_call": True, "invalid_tool_call_advantage": -5}, -5, "off"),
        ({"penalize_malformed_thinking": False, "malformed_thinking_advantage": -7}, "off", "off"),
        ({"invalid_tool_call_strategy": "mask", "malformed_thinking_advantage": -7}, None, -7),
        ({"invalid_tool_call_strategy": "mask", "invalid_tool_call_advantage": -5}, None, "off"),
        ({"invalid_tool_call_strategy": "", "invalid_tool_call_advantage": -5}, -5, "off"),
    ],
)
def test_which_turns_are_penalised_and_how(keys: dict[str, object], call: object, thinking: object) -> None:
    found = treatments(GrpoConfig.model_validate(keys))
    assert found.get(Violation.INVALID_TOOL_CALL, "off") == call
    assert found.get(Violation.MALFORMED_THINKING, "off") == thinking
