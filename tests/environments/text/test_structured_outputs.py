from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemotron_steps.environments.base import Response, Session
from nemotron_steps.environments.registry import create
from nemotron_steps.environments.text import json_schema, structured_outputs
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


@pytest.mark.parametrize(
    ("value", "schema", "coerced"),
    [
        ("3", {"type": "integer"}, 3),
        ("3", {"type": "number"}, 3.0),
        ("3", {"type": "string"}, "3"),
        ("3", {}, "3"),
        ("x", {"type": "integer"}, "x"),
        ("TRUE", {"type": "boolean"}, True),
        ("0", {"type": "boolean"}, False),
        ("1", {"type": "boolean"}, True),
        ("False", {"type": "boolean"}, False),
        ("2", {"type": "boolean"}, "2"),
        ("3", {"type": ["null", "integer"]}, 3),
        ("x", {"type": ["integer", "string"]}, "x"),
        ("", {"type": ["null", "string"]}, None),
        ("", {"type": "string"}, ""),
        (None, {"type": "string"}, ""),
        (None, {"type": ["string", "null"]}, None),
        (None, {"type": "integer"}, None),
        (None, {"type": "array"}, []),
        ("1", {"type": "array", "items": {"type": "integer"}}, [1]),
        ({"item": ["1", "2"]}, {"type": "array", "items": {"type": "integer"}}, [1, 2]),
        ({"a": "1", "b": "2"}, {"type": "array"}, [{"a": "1", "b": "2"}]),
        ({"a": "1", "b": "2"}, {"type": "object", "properties": {"a": {"type": "integer"}}}, {"a": 1, "b": "2"}),
        ("3", True, "3"),
    ],
)
def test_strings_become_what_the_schema_asks_for_or_stay(value: Any, schema: Any, coerced: Any) -> None:
    found = formats.coerce(value, schema)
    assert found == coerced and type(found) is type(coerced)


def test_xml_keeps_attributes_repeated_children_and_mixed_text() -> None:
    text = "<a x='1'> said <b>1</b><b/><b>3</b><c><d>4</d></c></a>"
    assert formats.parse(text, "xml", {}) == {"a": {"@x": "1", "b": ["1", None, "3"], "c": {"d": "4"}, "#text": "said"}}
    for declaration in ('<!DOCTYPE a SYSTEM "x">', "<!ENTITY x 'y'>"):
        with pytest.raises(formats.FormatError, match="document type"):
            formats.parse(f"{declaration}<a/>", "xml", {})


NUMBERS = {"type": "object", "properties": {"n": {"type": ["integer", "number"]}}}


@pytest.mark.parametrize(
    ("kind", "text", "problem"),
    [
        ("json", " ", "nothing was answered"),
        *(
            (kind, text, "not finite")
            for kind, texts in {
                "json": (
                    "[-Infinity]",
                    "[NaN]",
                    "[1e999]",
                    "[-1e999]",
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
        ("json", "1" * (formats.MAX_LENGTH + 1), "longer than"),
        ("yaml", "[" * 101 + "]" * 101, "nested deeper"),
        ("yaml", "&a [*a]", "aliases"),
        ("yaml", "a: !!int ''", "out of range"),
        ("yaml", "a: !!bool x", "x"),
        ("yaml", "a: !!timestamp x", "groupdict"),
        ("yaml", f"a: 1{':00' * 200}.0", "too large"),
        ("csv", 'a,b\n"1,2', "unexpected end"),
        ("csv", "a,b\n1\n", "more or fewer fields"),
        ("csv", "a,b\n1,2,3\n", "more or fewer fields"),
    ],
)
def test_a_document_is_refused_for_what_is_wrong_with_it(kind: str, text: str, problem: str) -> None:
    with pytest.raises(formats.FormatError, match=problem):
        formats.parse(text, kind, NUMBERS if "not finite" in problem else {})


def test_documents_at_the_limits_are_read() -> None:
    assert formats.parse('"' + "x" * (formats.MAX_LENGTH - 2) + '"', "json", {}) == "x" * (formats.MAX_LENGTH - 2)
    assert formats.parse("[" * 100 + "]" * 100, "yaml", {}) is not None
    assert formats.parse("[[], []]" + "\n", "yaml", {}) == [[], []]
    assert formats.parse("a,b\n1,2\n\n3,4\n", "csv", {"items": {"type": "object"}}) == [
        {"a": "1", "b": "2"}, {"a": "3", "b": "4"},
    ]  # fmt: skip
    with pytest.raises(ValueError, match="unknown format"):
        formats.parse("x", "ini", {})


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


@pytest.mark.parametrize("key", ["enum", "const", "default"])
def test_data_within_a_schema_is_no_schema(key: str) -> None:
    data: Any = {"type": "object", "properties": {"x": {}}, "additionalProperties": "true"}
    assert json_schema.strictify({key: data}) == {key: data}
    assert json_schema.strictify({"not": data})["not"]["additionalProperties"] is False


@pytest.mark.parametrize(
    ("arguments", "key", "reward"),
    [(GOOD, None, 1.0), ({"data": GOOD}, None, 0.0), ([GOOD], None, 0.0), ({"data": GOOD, "x": 1}, "data", 0.0)],
)
def test_a_calls_arguments_are_one_object_where_no_argument_is_named(arguments: Any, key: Any, reward: float) -> None:
    environment = create("structured_outputs")
    task = row(response_mode="tool_call", tool_name="submit", **({"tool_payload_key": key} if key else {}))
    output = [call("submit", json.dumps(arguments))]
    verdict = asyncio.run(environment.verify(task, Response.from_output(output), Session()))
    assert verdict.reward == reward
    listed = structured_outputs.problem_of("[1]", "json", "{}", None, True)
    assert listed == (False, "the arguments are not a JSON object")


def test_the_name_of_an_argument_means_nothing_where_a_text_is_asked_for() -> None:
    environment = create("structured_outputs")
    task = row(tool_payload_key="data")
    assert asyncio.run(environment.verify(task, Response(json.dumps(GOOD)), Session())).reward == 1.0


@pytest.mark.parametrize(
    ("length", "schema", "helped"),
    [
        (structured_outputs.INLINE_LENGTH, {}, False),
        (structured_outputs.INLINE_LENGTH + 1, {}, True),
        (4, {"pattern": "a"}, True),
        (4, {"patternProperties": {"a": {}}}, True),
    ],
)
def test_what_may_take_long_is_graded_in_a_helper_process(length: int, schema: Any, helped: bool) -> None:
    asked = []

    class Pool:
        async def call(self, *arguments: Any) -> Any:
            asked.append(arguments)
            return structured_outputs.problem_of(*arguments)

    environment: Any = create("structured_outputs")
    environment._pools[structured_outputs.problem_of] = Pool()
    text = json.dumps("a" * (length - 2))
    assert asyncio.run(environment.verify(row(schema=schema), Response(text), Session())).reward == 1.0
    assert len(asked) == helped
