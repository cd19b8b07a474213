"""structured_outputs: 1 if the answer parses in the row's format and satisfies the row's schema made strict (all
properties required, no others), else 0. With `response_mode: tool_call` the answer is the named tool's argument."""

import csv
import io
import json
import tomllib
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from functools import lru_cache
from typing import Any, ClassVar, Literal, get_args

from nemotron_steps.environments.base import Environment, GradeResult, Row, RowError, Session
from nemotron_steps.environments.responses import Response, finite, json_of
from nemotron_steps.errors import UnsupportedError

Format = Literal["json", "yaml", "xml", "toml", "csv"]

MAX_LENGTH = 100_000
"""Characters of a document, which is some 25,000 tokens. Within them every parser here ends in about a second."""
MAX_DEPTH = 100
"""Nesting of a YAML document, whose parser takes quadratic time over it and then overflows its stack."""

DATA = ("enum", "const", "default")
"""Keywords of a schema whose values are data, not schemas."""
TOO_DEEP = "nested too deep"

Schema = dict[str, Any]


class FormatError(ValueError):
    """The text is not in the format."""


def parse(text: str, kind: str, schema: Schema) -> Any:
    """Plain data of `text`."""
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
            if "<!DOCTYPE" in text or "<!ENTITY" in text:
                raise FormatError("document type declarations are not accepted")
            root = ElementTree.fromstring(text.strip())
            return finite(coerce({root.tag: _element(root)}, schema))
        header, *rows = csv.reader(io.StringIO(text), strict=True)
        rows = [line for line in rows if line]
        if not rows or any(len(line) != len(header) for line in rows):
            raise FormatError("no row, or one with more or fewer fields than the header")
        items = schema.get("items", schema)
        return finite([coerce(dict(zip(header, line, strict=True)), items) for line in rows])
    except (ValueError, RecursionError, csv.Error, ElementTree.ParseError) as error:
        raise FormatError(str(error)[:200]) from error


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
            try:
                if name in _SCALARS:
                    return _SCALARS[name](value)
            except (ValueError, KeyError):
                continue
    return value


_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}
_SCALARS: dict[Any, Callable[[str], Any]] = {
    "integer": int,
    "number": float,
    "boolean": lambda text: _BOOLEANS[text.lower()],
    "string": str,
}


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


INLINE_LENGTH = 10_000


class StructuredOutputs(Environment):
    """See the module docstring.

    A row has `schema_str` (a JSON schema as text) and `schema_type` (json, yaml, xml, toml or csv).
    """

    name: ClassVar[str] = "structured_outputs"
    required_fields: ClassVar[tuple[str, ...]] = ("schema_str",)

    def check_values(self, row: Row) -> None:
        if _format(row) not in get_args(Format):
            raise RowError("schema_type", f"one of {', '.join(get_args(Format))}", repr(row["schema_type"]))
        try:
            schema = json.loads(row["schema_str"])
        except (ValueError, TypeError) as error:
            raise RowError("schema_str", "a JSON Schema as text", str(error)) from error
        if not isinstance(schema, dict):
            raise RowError("schema_str", "a JSON object", type(schema).__name__)
        problem = schema_problem(strictify(schema))
        if problem is not None:
            raise RowError("schema_str", "a valid JSON Schema", problem)
        if row.get("response_mode") == "tool_call" and not row.get("tool_name"):
            raise RowError("tool_name", "the tool to call, since response_mode is tool_call", "none")

    async def verify(self, row: Row, response: Response, session: Session) -> GradeResult:
        """1 or 0; `details` names what was wrong."""
        schema, text, kind, key = str(row["schema_str"]), response.text, _format(row), None
        if is_call := row.get("response_mode") == "tool_call":
            names = [call.name for call in response.tool_calls]
            if names != [row["tool_name"]]:
                wrong = f"expected one call of {row['tool_name']}, found {names}"[:300]
                return GradeResult(0.0, {"parsed": 0.0}, details={"problem": wrong})
            text, kind, key = response.tool_calls[0].arguments, "json", row.get("tool_payload_key")
        if len(text) <= INLINE_LENGTH and '"pattern' not in schema:
            parsed, problem = problem_of(text, kind, schema, key, is_call)
        else:
            parsed, problem = await self.in_helper(problem_of, text, kind, schema, key, is_call)
        return GradeResult(float(problem is None), {"parsed": float(parsed)}, details={"problem": problem})


def problem_of(text: str, kind: str, schema_text: str, key: str | None, is_call: bool) -> tuple[bool, str | None]:
    """(whether a text is of its format, what is wrong with it or None)."""
    validator = _strict_validator(schema_text)
    try:
        value = parse(text, kind, validator.schema)
    except FormatError as error:
        return False, f"not {kind}: {error}"
    if is_call and not isinstance(value, dict):
        return False, "the arguments are not a JSON object"
    if key:
        if set(value) != {key}:
            return False, f"expected the one argument {key!r}, found {sorted(value)}"[:300]
        value = value[key]
    return True, problem_with(value, validator)


@lru_cache(maxsize=64)
def _strict_validator(schema_text: str) -> Any:
    return validator_of(strictify(json.loads(schema_text)))


def _format(row: Row) -> str:
    return str(row.get("schema_type") or "json")


def validator_of(schema: dict[str, Any]) -> Any:
    """What `problem_with` asks; it takes longer to make than to ask."""
    try:
        import jsonschema
        from jsonschema_specifications import REGISTRY
    except ImportError as error:
        what = "schema validation needs the jsonschema package"
        raise UnsupportedError(what, found=str(error), hints=("pip install jsonschema",)) from error
    # A schema may refer to the metaschemas besides itself, and to nothing over the network.
    return jsonschema.Draft202012Validator(schema, registry=REGISTRY)


def problem_with(value: Any, validator: Any) -> str | None:
    """The first reason why a value does not satisfy a schema, or None: to collect them all takes far longer."""
    try:
        error = next(validator.iter_errors(value), None)
    except RecursionError:
        return TOO_DEEP
    return None if error is None else f"{error.json_path}: {error.message}"[:300]


def schema_problem(schema: dict[str, Any]) -> str | None:
    """Why nothing can be validated against a schema, or None, as far as plain values show it."""
    validator = validator_of(schema)
    values: tuple[Any, ...] = (None, {}, [], "", 0)
    try:
        validator.check_schema(schema)
        _refuse_lost_references(schema)
        if TOO_DEEP in [problem_with(value, validator) for value in values]:
            return "it refers to itself without an end"
    except Exception as error:  # references that lead nowhere, regular expressions
        return str(error).partition("\n")[0][:200]
    return None


def _refuse_lost_references(schema: Any, resolver: Any = None) -> None:
    """Also of those that plain values do not lead to: every answer that does would be masked."""
    from jsonschema_specifications import REGISTRY
    from referencing.jsonschema import DRAFT202012

    for item in schema if isinstance(schema, list) else ():
        _refuse_lost_references(item, resolver)
    if not isinstance(schema, dict):
        return
    if resolver is None:
        resolver = REGISTRY.resolver_with_root(DRAFT202012.create_resource(schema))
    if isinstance(schema.get("$id"), str):
        resolver = resolver.in_subresource(DRAFT202012.create_resource(schema))
    for key, value in schema.items():
        if key in ("$ref", "$dynamicRef") and isinstance(value, str):
            resolver.lookup(value)
        if key not in DATA:
            _refuse_lost_references(value, resolver)


def strictify(schema: Any) -> Any:
    """A copy of a schema in which every object requires all its properties and allows no others."""
    if isinstance(schema, list):
        return [strictify(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    # Data inside a schema (enum, const, default) is not itself a schema.
    strict = {key: value if key in DATA else strictify(value) for key, value in schema.items()}
    if strict.get("additionalProperties") in ("true", "false"):
        strict["additionalProperties"] = strict["additionalProperties"] == "true"
    properties = schema.get("properties")
    # A property may itself be named "properties"; then its value is a schema, not a map of schemas.
    if isinstance(properties, dict) and all(isinstance(value, (dict, bool)) for value in properties.values()):
        strict["required"] = list(properties)
        strict["additionalProperties"] = False
    return strict
