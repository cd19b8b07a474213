from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemotron_steps.environments.base import Response, Session
from nemotron_steps.environments.registry import create
from nemotron_steps.environments.text import json_schema
from nemotron_steps.environments.text import structured_formats as formats
from nemotron_steps.errors import DataError

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


@pytest.mark.parametrize("text", ["", "name,age", "name,age\n\n", "anything at all", "\n"])
def test_a_csv_without_a_row_is_no_answer(text: str) -> None:
    assert grade(text, "csv", {"type": "array", "items": SCHEMA}) == 0.0


@pytest.mark.parametrize("kind", ["json", "yaml", "xml", "toml", "csv"])
def test_no_answer_satisfies_no_schema(kind: str) -> None:
    for text in ("", " \n", "<think>[]", "<think>[]</think>"):
        assert grade(Response.from_text(text).text, kind, {}) == 0.0


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


@given(st.text(max_size=200), st.sampled_from(["json", "yaml", "xml", "toml", "csv"]))
def test_any_text_parses_or_is_a_format_error(text: str, kind: str) -> None:
    try:
        formats.parse(text, kind, SCHEMA)
    except formats.FormatError as error:
        assert str(error) is not None


def test_strictify_leaves_data_and_its_argument_alone() -> None:
    schema = {"properties": {"properties": {"type": "object", "properties": {"x": {"enum": [{"properties": {}}]}}}}}
    before = json.dumps(schema)
    strict = json_schema.strictify(schema)
    assert json.dumps(schema) == before
    assert strict["required"] == ["properties"]
    assert strict["properties"]["properties"]["required"] == ["x"]
    assert strict["properties"]["properties"]["properties"]["x"] == {"enum": [{"properties": {}}]}


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


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        (row("ini"), "schema_type"),
        ({**row(), "schema_str": "{"}, "schema_str"),
        (row(schema={"type": "thing"}), "schema_str"),
        (row(schema=[1]), "schema_str"),
        (row(response_mode="tool_call"), "tool_name"),
    ],
)
def test_unusable_rows_are_refused(bad: dict[str, Any], field: str) -> None:
    with pytest.raises(DataError) as caught:
        create("structured_outputs").check_row(bad, "f:9")
    assert caught.value.where == f"f:9 field {field}"
