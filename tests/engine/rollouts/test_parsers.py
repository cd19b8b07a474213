"""Reading assistant turns: what a model wrote comes back, and what cannot be read stays text."""

import json
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemotron_steps.config.schema.policy import ToolParserName
from nemotron_steps.engine.rollouts.conversation import TOOL_PARSERS

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


MALFORMED = [
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": }}</tool_call>'),
    ("hermes", "<tool_call>" + "[" * 100_000 + "</tool_call>"),
    ("qwen3_coder", "<tool_call><function=f><parameter=a>1</function></tool_call>"),
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


@pytest.mark.parametrize(
    ("text", "calls", "malformed"),
    [
        (' <|python_tag|> {"name": "f", "parameters": {"a": 1}} ', [("f", {"a": 1})], 0),
        ('{"name": "f", "parameters": "{}"};{"name": "g", "parameters": {}}', [("f", {}), ("g", {})], 0),
        ('{"name": "f", "parameters": {}}, {"name": "g", "parameters": {}}', [], 1),
        ('{"answer": 3}', [], 0),  # JSON that names no tool is an answer
        ('say {"name": "f", "parameters": {}}', [], 0),
    ],
)
def test_llama_calls_are_the_whole_answer(text, calls, malformed):
    got, found = read("llama3_json", text)
    assert got == calls and len(found.malformed) == malformed
    assert found.text == ("" if calls else text)
