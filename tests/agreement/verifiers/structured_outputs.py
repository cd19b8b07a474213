"""structured_outputs: JSON, YAML, XML, TOML, CSV and tool calls."""

from __future__ import annotations

import csv
import io
import json
import random
from typing import Any
from xml.sax.saxutils import escape

import yaml

from tests.agreement.answers import Items, call_item, message, mutated_value, pick, styled
from tests.agreement.compare import LAST_MESSAGE, THINK_TAGS, Rule
from tests.agreement.gym import Gym
from tests.agreement.rows import asking, read

_TEXT, _COUNT = {"type": "string"}, {"type": "integer"}
PERSON = {
    "type": "object",
    "properties": {
        "name": _TEXT,
        "age": _COUNT,
        "height_m": {"type": "number"},
        "member": {"type": "boolean"},
        "nickname": {"type": ["string", "null"]},
        "children": {"type": ["integer", "null"]},
        "level": {"type": "string", "enum": ["low", "high"]},
        "tags": {"type": "array", "items": _TEXT},
        "address": {"type": "object", "properties": {"city": _TEXT, "zip": _COUNT}, "required": ["city"]},
        "jobs": {"type": "array", "items": {"type": "object", "properties": {"title": _TEXT, "years": _COUNT}}},
    },
    "required": ["name"],
}
FLAT = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"name": _TEXT, "age": _COUNT, "ratio": {"type": ["number", "null"]}, "open": {"type": "boolean"}},
    },
}


def rows(gym: Gym, rng: random.Random) -> list[dict[str, Any]]:
    rooted = {"type": "object", "properties": {"person": PERSON}}
    kinds = (("json", PERSON), ("yaml", PERSON), ("toml", PERSON), ("xml", rooted), ("csv", FLAT), ("json", FLAT))
    made = [asking("Extract it.", schema_str=json.dumps(schema), schema_type=kind) for kind, schema in kinds * 2]
    names = ("example.jsonl", "structured_outputs_v3_example.jsonl")
    return [*made, *read(*(gym.data("structured_outputs", name) for name in names))]


def example(schema: Any, rng: random.Random, nulls: bool = True) -> Any:
    """A value of a schema, all properties present."""
    kinds = schema.get("type", "string")
    kind = rng.choice([each for each in kinds if nulls or each != "null"]) if isinstance(kinds, list) else kinds
    if "enum" in schema:
        return rng.choice(schema["enum"])
    if kind == "object":
        return {key: example(each, rng, nulls) for key, each in schema.get("properties", {}).items()}
    if kind == "array":
        return [example(schema.get("items", {}), rng, nulls) for _ in range(rng.choice((1, 2, 2, 3)))]
    if kind == "integer":
        return rng.randrange(100)
    if kind == "number":
        return rng.choice((1.75, 2, 0.5, -3.25))
    if kind == "boolean":
        return rng.random() < 0.5
    return None if kind == "null" else rng.choice(("Ada", "Oslo, Norway", "2001-05-07", "red shoes", "12"))


def toml(value: dict[str, Any], path: str = "") -> str:
    """TOML of an object without nulls."""
    lines, tables = [], []
    for key, each in value.items():
        if isinstance(each, dict):
            tables.append(f"\n[{path}{key}]\n{toml(each, f'{path}{key}.')}")
        elif isinstance(each, list) and each and isinstance(each[0], dict):
            tables += [f"\n[[{path}{key}]]\n{toml(item, f'{path}{key}.')}" for item in each if isinstance(item, dict)]
        else:
            lines.append(f"{key} = {json.dumps(each)}")
    return "\n".join([*lines, *tables])


def xml(key: str, value: Any) -> str:
    """XML elements of a value, list items repeated under their key's own name."""
    if isinstance(value, dict):
        return f"<{key}>{''.join(xml(name, each) for name, each in value.items())}</{key}>"
    if isinstance(value, list):
        return f"<{key}>{''.join(xml('item', each) for each in value)}</{key}>"
    text = "" if value is None else str(value).lower() if isinstance(value, bool) else escape(str(value))
    return f"<{key}>{text}</{key}>"


def written(value: Any, kind: str, rng: random.Random) -> str:
    """A value in a format."""
    if kind == "yaml":
        return yaml.safe_dump(value, sort_keys=False)
    if kind == "toml" and isinstance(value, dict):
        return toml(value)
    if kind == "xml" and isinstance(value, dict):
        return "".join(xml(key, each) for key, each in value.items())
    if kind == "csv" and isinstance(value, list) and value and all(isinstance(line, dict) for line in value):
        out = io.StringIO()
        table = csv.DictWriter(out, list({key: None for line in value for key in line}))
        table.writeheader()
        table.writerows(value)
        return out.getvalue()
    return json.dumps(value, indent=rng.choice((None, 2)))


def answer(row: dict[str, Any], rng: random.Random) -> tuple[str, Items]:
    kind, schema = row.get("schema_type") or "json", json.loads(row["schema_str"])
    right = example(schema, rng, nulls=kind != "toml")
    if kind == "csv" and isinstance(right, dict):
        right = [right]
    what = pick(rng, {"right": 50, "mutated": 35, "another format": 3, "no data": 2, "broken": 5, "empty": 1})
    value = mutated_value(right, rng) if what == "mutated" else right
    if row.get("response_mode") == "tool_call":
        key = row.get("tool_payload_key")
        arguments = json.dumps({key: value} if key else value)
        shape = pick(rng, {"call": 80, "two calls": 4, "another tool": 4, "in the text": 6, "not wrapped": 4, "more keys": 3})
        if shape == "in the text":
            return f"{what}, {shape}", message(arguments)
        if shape == "not wrapped":
            arguments = json.dumps(value)
        elif shape == "more keys" and key:
            arguments = json.dumps({key: value, "note": "as asked"})
        if what == "broken":
            arguments = arguments[: -rng.randint(1, 5)]
        name = "another_tool" if shape == "another tool" else row["tool_name"]
        items = [call_item(name, arguments)]
        return f"{what}, {shape}", items * 2 if shape == "two calls" else items
    core = written(value, "json" if what == "another format" else kind, rng)
    if what == "no data":
        core = "I cannot do that."
    elif what == "broken":
        place = rng.randrange(max(1, len(core)))
        core = core[:place] + core[place + 1 :]
    elif what == "empty":
        core = rng.choice(("{}", "[]", "null", "\n"))
    style, items = styled(core.strip("\n"), "{}", rng)
    return f"{kind}, {what}, {style}", items


def theirs(gym: Gym) -> Any:
    return gym.grader("structured_outputs", "StructuredOutputs")


RULES = (THINK_TAGS, LAST_MESSAGE)
