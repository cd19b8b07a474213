"""Reading assistant turns: what a model wrote comes back, and what cannot be read stays text."""

from __future__ import annotations

import json
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from nemotron_steps.config.schema.policy import GenerationConfig, ReasoningParserName, ToolParserName
from nemotron_steps.engine.grpo.rewards import has_invalid_tool_call
from nemotron_steps.engine.rollouts.conversation import REASONING_PARSERS, TurnFormat, parse_assistant
from nemotron_steps.engine.rollouts.tool_calls import TOOL_CALL_MARKERS, TOOL_PARSERS

NAMES = st.from_regex(r"[a-z][a-z0-9_.-]{0,12}", fullmatch=True)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
CALLS = st.lists(st.tuples(NAMES, st.dictionaries(st.text(max_size=8), VALUES, max_size=3)), min_size=1, max_size=3)
# Text around calls holds no tag and no white space at its ends, which parsing strips.
PROSE = st.text(alphabet=st.characters(exclude_characters="<>{};", exclude_categories=["C", "Z"]), max_size=12)


def hermes_text(calls):
    return "\n".join(
        f"<tool_call>\n{json.dumps({'name': n, 'arguments': a}, ensure_ascii=False)}\n</tool_call>" for n, a in calls
    )


def nemotron_text(calls):
    return f"<TOOLCALL>{json.dumps([{'name': n, 'arguments': a} for n, a in calls])}</TOOLCALL>"


def llama_text(calls):
    return "; ".join(json.dumps({"name": n, "parameters": a}) for n, a in calls)


def coder_text(calls):
    blocks = []
    for name, arguments in calls:
        lines = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
        blocks.append(f"<tool_call>\n<function={name}>\n{lines}</function>\n</tool_call>")
    return "\n".join(blocks)


def read(parser, text, tools=()):
    found = TOOL_PARSERS[parser](text, tools)
    return [(name, json.loads(arguments)) for name, arguments in found.calls], found


@settings(max_examples=60, deadline=None)
@given(CALLS, PROSE)
def test_json_calls_round_trip(calls, prose):
    """Also where an argument contains the closing tag."""
    calls = [*calls, ("last", {"text": "a </tool_call> and </TOOLCALL> inside"})]
    for parser, write in (("hermes", hermes_text), ("nemotron_json", nemotron_text)):
        got, found = read(parser, prose + write(calls))
        assert got == calls
        assert (found.text, found.malformed) == (prose, ())
    assert read("llama3_json", llama_text(calls))[0] == calls


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(NAMES, st.dictionaries(NAMES, st.text(max_size=20), max_size=3)), min_size=1, max_size=3))
def test_xml_calls_round_trip(calls):
    assert read("qwen3_coder", "Let me see.\n" + coder_text(calls))[0] == calls


def test_xml_values_take_their_types_from_the_offered_tool():
    tool = {
        "type": "function",
        "name": "f",
        "parameters": {
            "properties": {
                "count": {"type": "integer"},
                "ratio": {"type": "number"},
                "on": {"type": "boolean"},
                "items": {"type": "array"},
                "label": {"type": "string"},
                "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            }
        },
    }
    sent = {"count": 3, "ratio": 0.5, "on": True, "items": '["a"]', "label": 7, "maybe": "null", "other": 1}
    ((name, arguments),), _ = read("qwen3_coder", coder_text([("f", sent)]), [tool])
    assert name == "f"
    assert arguments == {
        "count": 3,
        "ratio": 0.5,
        "on": True,
        "items": ["a"],
        "label": "7",
        "maybe": None,
        "other": "1",
    }
    ((_, wrong),), _ = read("qwen3_coder", coder_text([("f", {"count": "many"})]), [tool])
    assert wrong == {"count": "many"}  # the environment says what is wrong with it; the parser does not guess


def test_a_value_nested_too_deep_to_be_read_stays_text():
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "array"}}}}}
    deep = "[" * 100_000
    assert read("qwen3_coder", coder_text([("f", {"a": deep})]), [tool])[0] == [("f", {"a": deep})]


MALFORMED = [
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": }}</tool_call>'),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}} trailing</tool_call>'),
    ("hermes", "<tool_call>" + "[" * 100_000 + "</tool_call>"),
    ("nemotron_json", "<TOOLCALL>[]</TOOLCALL>"),
    ("nemotron_json", '<TOOLCALL>[{"name": 3}]</TOOLCALL>'),
    ("qwen3_coder", "<tool_call><function=f><parameter=a>1</function></tool_call>"),
    ("qwen3_coder", '<tool_call>{"name": "f", "arguments": {}}</tool_call>'),
    ("llama3_json", '{"name": "f", "parameters": {}} and more'),
]


@pytest.mark.parametrize(("parser", "text"), MALFORMED)
def test_a_malformed_call_stays_text_and_is_named(parser, text):
    found = TOOL_PARSERS[parser](text, ())
    assert (found.calls, found.text) == ((), text)
    assert len(found.malformed) == 1


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=60), st.sampled_from([*get_args(ToolParserName)]), st.sampled_from(["<tool_call>", "{", ""]))
def test_any_text_is_read_without_an_error(text, parser, opening):
    found = TOOL_PARSERS[parser](opening + text, ())
    assert found.calls or found.text == opening + text


def test_one_good_and_one_broken_call():
    text = 'Now: <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call> <tool_call>{oops}</tool_call>'
    turn = parse_assistant(text, "c")
    assert [(c.name, c.parsed_arguments(), c.call_id) for c in turn.tool_calls] == [("f", {"a": 1}, "c_0")]
    assert turn.text == "Now:  <tool_call>{oops}</tool_call>" and turn.malformed_tool_calls == ("{oops}",)


def test_reasoning_parsers_differ_where_no_tag_was_written():
    read = {name: parser("a thought") for name, parser in REASONING_PARSERS.items()}
    opened_in_prompt = ("a thought", "")
    assert read == {
        "qwen3": ("", "a thought"),
        "deepseek_r1": opened_in_prompt,
        "nano_v3": opened_in_prompt,
        "none": ("", "a thought"),
    }
    for name in ("qwen3", "deepseek_r1"):
        assert REASONING_PARSERS[name]("<think>hm</think> yes") == ("hm", "yes")
    assert REASONING_PARSERS["none"]("<think>hm</think> yes") == ("", "<think>hm</think> yes")


def test_an_unknown_parser_is_refused_with_the_nearest_name():
    with pytest.raises(ValidationError, match="did you mean hermes"):
        GenerationConfig(tool_parser="hermess")
    with pytest.raises(ValidationError, match="known: qwen3, deepseek_r1, nano_v3, none"):
        GenerationConfig(reasoning_parser="no such thing")
    assert set(TOOL_PARSERS) == set(TOOL_CALL_MARKERS) == set(get_args(ToolParserName))
    assert set(REASONING_PARSERS) == set(get_args(ReasoningParserName))


def test_penalties_read_turns_in_the_models_own_format():
    text = coder_text([("f", {"a": "1"})])
    assert not has_invalid_tool_call(text, ["<tool_call>"], TurnFormat("qwen3", "qwen3_coder"))
    assert has_invalid_tool_call(text, ["<tool_call>"])


@pytest.mark.parametrize(
    ("text", "calls", "malformed"),
    [
        (' <|python_tag|> {"name": "f", "parameters": {"a": 1}} ', [("f", {"a": 1})], 0),
        ('{"name": "f", "arguments": {"a": 1}}', [("f", {"a": 1})], 0),
        ('{"name": "f", "parameters": "{}"};{"name": "g", "parameters": {}}', [("f", {}), ("g", {})], 0),
        ('{"name": "f", "parameters": {}};', [], 1),
        ('{"name": "f", "parameters": {}}, {"name": "g", "parameters": {}}', [], 1),
        ('{"answer": 3}', [], 0),  # JSON that names no tool is an answer
        ('<|python_tag|>{"answer": 3}', [], 1),
        ("<|python_tag|>print(1)", [], 0),
        ('say {"name": "f", "parameters": {}}', [], 0),
    ],
)
def test_llama_calls_are_the_whole_answer(text, calls, malformed):
    got, found = read("llama3_json", text)
    assert got == calls and len(found.malformed) == malformed
    assert found.text == ("" if calls else text)


@pytest.mark.parametrize(
    ("schema", "value", "typed"),
    [
        ({"type": "integer"}, " 3 ", 3),
        ({"type": "integer"}, "3.5", "3.5"),
        ({"type": "integer"}, "true", "true"),
        ({"type": "number"}, "3", 3),
        ({"type": "number"}, "True", "True"),
        ({"type": "boolean"}, "False", False),
        ({"type": "boolean"}, "1", "1"),
        ({"type": "null"}, "None", None),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "3", "3"),
        ({"type": "object"}, '{"a": 1}', {"a": 1}),
        ({"type": "object"}, "[1]", "[1]"),
        ({"type": "array"}, "[1]", [1]),
        ({"oneOf": [{"type": "string"}, {"type": "integer"}]}, "3", 3),
        ({"type": "what"}, "3", "3"),
        ({}, "3", "3"),
        (True, "3", "3"),
    ],
)
def test_an_xml_value_is_typed_by_its_schema_or_stays_text(schema, value, typed):
    for tool in ({"name": "f"}, {"function": {"name": "f"}}):
        (tool.get("function") or tool)["parameters"] = {"properties": {"a": schema}}
        ((_, arguments),), _ = read("qwen3_coder", coder_text([("f", {"a": value})]), [{"name": "g"}, tool])
        assert arguments == {"a": typed} and type(arguments["a"]) is type(typed)


def test_an_xml_value_loses_one_line_break_at_each_end_only():
    text = "<tool_call>\n<function= f >\n<parameter= a >\n\n x \n\n</parameter>\n</function>\n</tool_call> "
    assert read("qwen3_coder", text)[0] == [("f", {"a": "\n x \n"})]


def test_a_call_that_is_cut_off_is_text_and_one_after_a_broken_one_is_read():
    cut = 'a <tool_call>{"name": "f"'
    assert TOOL_PARSERS["hermes"](cut, ()).malformed == () and TOOL_PARSERS["hermes"](cut, ()).text == cut
    got, found = read("hermes", 'a <tool_call>{}</tool_call> b <tool_call>{"name": "f", "arguments": {}}</tool_call> c')
    assert got == [("f", {})] and found.text == "a <tool_call>{}</tool_call> b  c" and found.malformed == ("{}",)
    got, found = read("nemotron_json", '<TOOLCALL>{"name": "f", "arguments": {}}</TOOLCALL>')
    assert got == [("f", {})] and found.text == ""
    for name in ("", 3, None):
        assert TOOL_PARSERS["hermes"](hermes_text([(name, {})]), ()).calls == ()
