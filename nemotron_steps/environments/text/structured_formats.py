"""Parse JSON, YAML, XML, TOML and CSV texts written by a model into plain data for schema validation.

XML and CSV carry only strings, so their values are turned into the schema's types where they can be. Safe on any
input: no entity, tag or alias expansion, no code.
"""

from __future__ import annotations

import csv
import io
import json
import tomllib
import xml.etree.ElementTree as ElementTree
from typing import Any, Literal

Format = Literal["json", "yaml", "xml", "toml", "csv"]

MAX_LENGTH = 1_000_000

Schema = dict[str, Any]


class FormatError(ValueError):
    """The text is not in the format."""


def parse(text: str, kind: str, schema: Schema) -> Any:
    """Plain data of `text`.

    Raises:
        FormatError: not valid in that format, or longer than MAX_LENGTH characters.
    """
    if len(text) > MAX_LENGTH:
        raise FormatError(f"longer than {MAX_LENGTH} characters")
    try:
        if kind == "json":
            return json.loads(text, parse_constant=_no_constant)
        if kind == "yaml":
            return _yaml(text)
        if kind == "toml":
            return tomllib.loads(text)
        if kind == "xml":
            return coerce(_xml(text), schema)
        if kind == "csv":
            return _csv(text, schema)
    except FormatError:
        raise
    except (ValueError, RecursionError, csv.Error, ElementTree.ParseError) as error:
        raise FormatError(str(error)[:200]) from error
    raise ValueError(f"unknown format {kind!r}")


def strictify(schema: Any) -> Any:
    """A copy of a schema in which every object requires all its properties and allows no others."""
    if isinstance(schema, list):
        return [strictify(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    # Data inside a schema (enum, const, default) is not itself a schema.
    strict = {key: value if key in ("enum", "const", "default") else strictify(value) for key, value in schema.items()}
    properties = schema.get("properties")
    # A property may itself be named "properties"; then its value is a schema, not a map of schemas.
    if isinstance(properties, dict) and all(isinstance(value, (dict, bool)) for value in properties.values()):
        strict["required"] = list(properties)
        strict["additionalProperties"] = False
    return strict


def coerce(value: Any, schema: Any) -> Any:
    """Strings of an XML or CSV document as the schema's types; what cannot be converted stays, and fails validation."""
    kind = schema.get("type") if isinstance(schema, dict) else None
    kinds = kind if isinstance(kind, list) else [kind]
    if "object" in kinds and isinstance(value, dict):
        properties = schema.get("properties", {})
        return {key: coerce(item, properties.get(key, {})) for key, item in value.items()}
    if "array" in kinds:
        if isinstance(value, dict) and len(value) == 1:
            # <skills><item>a</item></skills>: the wrapping element is XML's, not the data's.
            value = next(iter(value.values()))
        items = value if isinstance(value, list) else [] if value is None else [value]
        return [coerce(item, schema.get("items", {})) for item in items]
    if value is None:
        return None if "null" in kinds else "" if "string" in kinds else None
    if isinstance(value, str):
        if value == "" and "null" in kinds:
            return None
        for name in kinds:
            converted = _scalar(value, name)
            if converted is not None:
                return converted
    return value


def _scalar(text: str, kind: Any) -> Any:
    try:
        if kind == "integer":
            return int(text)
        if kind == "number":
            return float(text)
    except ValueError:
        return None
    if kind == "boolean":
        return {"true": True, "1": True, "false": False, "0": False}.get(text.lower())
    return text if kind == "string" else None


def _no_constant(name: str) -> Any:
    raise FormatError(f"{name} is not JSON")


def _yaml(text: str) -> Any:
    import yaml

    try:
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            if isinstance(event, yaml.AliasEvent):
                raise FormatError("aliases are not accepted")
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise FormatError(str(error)[:200]) from error


def _xml(text: str) -> dict[str, Any]:
    if "<!DOCTYPE" in text or "<!ENTITY" in text:
        raise FormatError("document type declarations are not accepted")
    root = ElementTree.fromstring(text.strip())
    return {root.tag: _element(root)}


def _element(element: ElementTree.Element) -> Any:
    """Attributes as "@name", repeated children as a list, mixed text as "#text", a bare text as a string."""
    data: dict[str, Any] = {f"@{name}": value for name, value in element.attrib.items()}
    for child in element:
        value = _element(child)
        if child.tag not in data:
            data[child.tag] = value
        elif isinstance(data[child.tag], list):
            data[child.tag].append(value)
        else:
            data[child.tag] = [data[child.tag], value]
    text = (element.text or "").strip()
    if not data:
        return text or None
    if text:
        data["#text"] = text
    return data


def _csv(text: str, schema: Schema) -> list[Any]:
    items = schema.get("items", schema)
    rows = list(csv.DictReader(io.StringIO(text), strict=True))
    if any(None in row or None in row.values() for row in rows):
        raise FormatError("a row has more or fewer fields than the header")
    return [coerce(dict(row), items) for row in rows]
