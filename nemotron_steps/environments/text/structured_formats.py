"""Parse JSON, YAML, XML, TOML and CSV texts written by a model into plain data for schema validation.

XML and CSV carry only strings, so their values are turned into the schema's types where they can be. Safe on any
input: no entity, tag or alias expansion, no code, no document without content.
"""

from __future__ import annotations

import csv
import io
import tomllib
import xml.etree.ElementTree as ElementTree
from typing import Any, Literal

from nemotron_steps.environments.responses import finite, json_of

Format = Literal["json", "yaml", "xml", "toml", "csv"]

MAX_LENGTH = 100_000
"""Characters of a document, which is some 25,000 tokens. Within them every parser here ends in about a second."""
MAX_DEPTH = 100
"""Nesting of a YAML document, whose parser takes quadratic time over it and then overflows its stack."""

Schema = dict[str, Any]


class FormatError(ValueError):
    """The text is not in the format."""


def parse(text: str, kind: str, schema: Schema) -> Any:
    """Plain data of `text`.

    Raises:
        FormatError: not valid in that format, empty, longer than MAX_LENGTH characters, or with a number that is not
            finite.
    """
    if not text.strip():
        raise FormatError("nothing was answered")
    if len(text) > MAX_LENGTH:
        raise FormatError(f"longer than {MAX_LENGTH} characters")
    try:
        if kind == "json":
            return json_of(text)
        if kind == "yaml":
            return finite(_yaml(text))
        if kind == "toml":
            return finite(tomllib.loads(text))
        if kind == "xml":
            return finite(coerce(_xml(text), schema))
        if kind == "csv":
            return finite(_csv(text, schema))
    except FormatError:
        raise
    except (ValueError, RecursionError, csv.Error, ElementTree.ParseError) as error:
        raise FormatError(str(error)[:200]) from error
    raise ValueError(f"unknown format {kind!r}")


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


def _yaml(text: str) -> Any:
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    depth = 0
    try:
        for event in yaml.parse(text, Loader=loader):
            if isinstance(event, yaml.AliasEvent):
                raise FormatError("aliases are not accepted")
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_DEPTH:
                raise FormatError(f"nested deeper than {MAX_DEPTH} levels")
        return yaml.load(text, Loader=loader)
    # The last three are of scalars that are not what their tag says, and of numbers that no float holds.
    except (yaml.YAMLError, LookupError, AttributeError, OverflowError) as error:
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
    lines = csv.reader(io.StringIO(text), strict=True)
    header = next(lines, [])
    rows = []
    for line in lines:
        if not line:
            continue
        if len(line) != len(header):
            raise FormatError("a row has more or fewer fields than the header")
        rows.append(coerce(dict(zip(header, line, strict=True)), items))
    if not rows:
        raise FormatError("a header and no row")
    return rows
