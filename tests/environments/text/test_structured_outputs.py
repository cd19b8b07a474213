import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemotron_steps.environments.base import Response, Session
from nemotron_steps.environments.registry import create
from nemotron_steps.environments.text import structured_outputs as formats

pytest.importorskip("jsonschema")

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "home": {"type": "object", "properties": {"ok": {"type": "boolean"}}},
    },
    "required": ["name"],
}
GOOD = {"name": "Ann", "age": 3, "tags": ["a", "b"], "home": {"ok": True}}


def row(kind: str = "json", schema: Any = SCHEMA, **more: Any) -> dict[str, Any]:
    return {
        "responses_create_params": {"input": "Extract."},
        "schema_str": json.dumps(schema),
        "schema_type": kind,
        **more,
    }


def grade(text: str, kind: str = "json", schema: Any = SCHEMA) -> float | None:
    environment = create("structured_outputs")
    environment.check_row(row(kind, schema), "f:1")

    async def run() -> float | None:
        verdict = await environment.verify(row(kind, schema), Response(text), Session())
        await environment.close()
        return verdict.reward

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        (json.dumps(GOOD), 1.0),
        (json.dumps(GOOD, indent=2) + "\n", 1.0),
        ("```json\n" + json.dumps(GOOD) + "\n```", 0.0),
        (json.dumps({**GOOD, "extra": 1}), 0.0),
        (json.dumps({k: v for k, v in GOOD.items() if k != "age"}), 0.0),
        (json.dumps({**GOOD, "home": {}}), 0.0),
        (json.dumps({**GOOD, "age": "3"}), 0.0),
        (json.dumps({**GOOD, "age": True}), 0.0),
        ('{"name": NaN}', 0.0),
        ("", 0.0),
        ("[" * 100_000, 0.0),
    ],
)
def test_json(text: str, reward: float) -> None:
    assert grade(text) == reward


def test_yaml() -> None:
    assert grade("name: Ann\nage: 3\ntags: [a, b]\nhome:\n  ok: true\n", "yaml") == 1.0
    assert grade("name: Ann\nage: three\ntags: [a]\nhome: {ok: true}\n", "yaml") == 0.0
    assert grade("name: !!python/object/apply:os.getpid []\n", "yaml") == 0.0
    assert grade("a: &x [1]\nb: [*x, *x]\n", "yaml") == 0.0


def test_toml() -> None:
    assert grade('name = "Ann"\nage = 3\ntags = ["a"]\n[home]\nok = true\n', "toml") == 1.0
    assert grade("name = Ann", "toml") == 0.0


def test_xml_values_take_the_types_of_the_schema() -> None:
    schema = {"type": "object", "properties": {"person": SCHEMA}}
    body = "<name>Ann</name><age>3</age><tags><tag>a</tag><tag>b</tag></tags><home><ok>true</ok></home>"
    assert grade(f"<person>{body}</person>", "xml", schema) == 1.0
    assert grade(f"<person>{body.replace('<tag>b</tag>', '')}</person>", "xml", schema) == 1.0
    assert grade(f"<person>{body.replace('3', 'three')}</person>", "xml", schema) == 0.0
    assert grade(f"<person>{body}", "xml", schema) == 0.0
    bomb = '<!DOCTYPE x [<!ENTITY a "aaaa">]><person>&a;</person>'
    assert grade(bomb, "xml", schema) == 0.0


def test_csv_rows_take_the_types_of_the_schema() -> None:
    item = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": ["integer", "null"]}}}
    schema = {"type": "array", "items": item}
    assert grade("name,age\nAnn,3\nBob,\n", "csv", schema) == 1.0
    assert grade("name,age\nAnn,three\n", "csv", schema) == 0.0
    assert grade("name,age\nAnn,3,4\n", "csv", schema) == 0.0
    assert grade("name\nAnn\n", "csv", schema) == 0.0


def test_documents_too_long_or_too_deep_are_refused() -> None:
    assert grade(json.dumps({**GOOD, "name": "x" * 50_000})) == 1.0  # in a helper process
    assert grade(json.dumps({**GOOD, "name": "x" * 100_001})) == 0.0
    assert grade("- " * 200 + "x", "yaml", {}) == 0.0
    assert grade("- " * 50 + "x", "yaml", {}) == 1.0
    recursive = {"$ref": "#/$defs/a", "$defs": {"a": {"items": {"$ref": "#/$defs/a"}}}}
    assert grade("[" * 900 + "]" * 900, "json", recursive) == 0.0


def test_public_spellings_of_a_schema_are_understood() -> None:
    loose = {"type": "object", "additionalProperties": "false", "properties": {"a": {"type": "string"}}}
    assert grade('{"a": "x"}', schema=loose) == 1.0
    assert grade('{"a": "x", "b": 1}', schema=loose) == 0.0
    assert grade('{"b": 1}', schema={"type": "object", "additionalProperties": "true"}) == 1.0
    assert grade('{"b": 1}', schema={"type": "object", "additionalProperties": "false"}) == 0.0
    without = {key: value for key, value in row().items() if key != "schema_type"}
    environment = create("structured_outputs")
    environment.check_row(without, "f:1")
    assert asyncio.run(environment.verify(without, Response(json.dumps(GOOD)), Session())).reward == 1.0


@pytest.mark.parametrize(
    ("value", "schema", "coerced"),
    [
        ("3", {"type": "integer"}, 3),
        ("3", {"type": "string"}, "3"),
        ("3", {}, "3"),
        ("x", {"type": "integer"}, "x"),
        ("TRUE", {"type": "boolean"}, True),
        ("2", {"type": "boolean"}, "2"),
        ("3", {"type": ["null", "integer"]}, 3),
        ("", {"type": ["null", "string"]}, None),
        (None, {"type": "string"}, ""),
        (None, {"type": "array"}, []),
        ("1", {"type": "array", "items": {"type": "integer"}}, [1]),
        ({"item": ["1", "2"]}, {"type": "array", "items": {"type": "integer"}}, [1, 2]),
        ({"a": "1", "b": "2"}, {"type": "array"}, [{"a": "1", "b": "2"}]),
        ({"a": "1", "b": "2"}, {"type": "object", "properties": {"a": {"type": "integer"}}}, {"a": 1, "b": "2"}),
    ],
)
def test_strings_become_what_the_schema_asks_for_or_stay(value: Any, schema: Any, coerced: Any) -> None:
    found = formats.coerce(value, schema)
    assert found == coerced and type(found) is type(coerced)


NUMBERS = {"type": "object", "properties": {"n": {"type": ["integer", "number"]}}}


@pytest.mark.parametrize(
    ("kind", "text", "problem"),
    [
        ("json", " ", "nothing was answered"),
        *(
            (kind, text, "not finite")
            for kind, texts in {
                "json": (
                    "[NaN]",
                    "[1" + "0" * 400 + "]",
                    '{"a": [{"b": 1e400}]}',
                ),
                "yaml": ("- .nan", "- -.inf", "- 1.0e+999", "- 0x" + "f" * 300, "a: {b: [.NaN]}"),
                "toml": ("a = nan", "a = -inf", "a = 1e999", "a = 0x" + "f" * 300),
                "csv": ("n\nnan", "n\n1e999", "n\n-Infinity", "n\n" + "9" * 400),
                "xml": ("<n>nan</n>", "<n>1e999</n>", "<n>Infinity</n>"),
            }.items()
            for text in texts
        ),
        ("yaml", "a: 1\n1: c", "not a string"),
        ("yaml", "&a [*a]", "aliases"),
        ("yaml", "a: !!int ''", "out of range"),
        ("yaml", "a: !!timestamp x", "groupdict"),
        ("yaml", f"a: 1{':00' * 200}.0", "too large"),
        ("csv", 'a,b\n"1,2', "unexpected end"),
        ("csv", "a,b\n1,2,3\n", "more or fewer fields"),
    ],
)
def test_a_document_is_refused_for_what_is_wrong_with_it(kind: str, text: str, problem: str) -> None:
    with pytest.raises(formats.FormatError, match=problem):
        formats.parse(text, kind, NUMBERS if "not finite" in problem else {})


@given(st.text(max_size=200), st.sampled_from(["json", "yaml", "xml", "toml", "csv"]))
def test_any_text_parses_or_is_a_format_error(text: str, kind: str) -> None:
    try:
        formats.parse(text, kind, SCHEMA)
    except formats.FormatError as error:
        assert str(error) is not None


def call(name: str, arguments: str) -> dict[str, Any]:
    return {"type": "function_call", "name": name, "arguments": arguments, "call_id": "c"}


@pytest.mark.parametrize(
    ("output", "reward"),
    [
        ([call("submit", json.dumps({"data": GOOD}))], 1.0),
        ([call("submit", json.dumps({"data": {**GOOD, "x": 1}}))], 0.0),
        ([call("submit", json.dumps(GOOD))], 0.0),
        ([call("other", json.dumps({"data": GOOD}))], 0.0),
        ([call("submit", json.dumps({"data": GOOD}))] * 2, 0.0),
        ([call("submit", "{")], 0.0),
        ([{"type": "message", "role": "assistant", "content": json.dumps(GOOD)}], 0.0),
    ],
)
def test_the_tool_call_form(output: list[dict[str, Any]], reward: float) -> None:
    environment = create("structured_outputs")
    tool_row = row(response_mode="tool_call", tool_name="submit", tool_payload_key="data")
    environment.check_row(tool_row, "f:1")
    verdict = asyncio.run(environment.verify(tool_row, Response.from_output(output), Session()))
    assert verdict.reward == reward
