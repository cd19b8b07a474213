"""JSON Schema (draft 2020-12): is a schema one, does a value satisfy it, and the strict form of a schema."""

from __future__ import annotations

from typing import Any

from nemotron_steps.errors import UnsupportedError


def schema_problem(schema: dict[str, Any]) -> str | None:
    """Why a schema is no valid JSON Schema, or None."""
    jsonschema = _jsonschema()
    try:
        jsonschema.Draft202012Validator.check_schema(schema)
    except jsonschema.SchemaError as error:
        return str(error.message)[:200]
    return None


def validation_problem(value: Any, schema: dict[str, Any]) -> str | None:
    """The first reason why `value` does not satisfy the schema, or None.

    Only the first: to collect a wrong value's every error takes far longer than to find that there is one.
    """
    try:
        error = next(_jsonschema().Draft202012Validator(schema).iter_errors(value), None)
    except RecursionError:
        return "nested too deep"
    return None if error is None else f"{error.json_path}: {error.message}"[:300]


def strictify(schema: Any) -> Any:
    """A copy of a schema in which every object requires all its properties and allows no others.

    `additionalProperties` written as the string "true" or "false", as some data sets have it, becomes the boolean.
    """
    if isinstance(schema, list):
        return [strictify(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    # Data inside a schema (enum, const, default) is not itself a schema.
    strict = {key: value if key in ("enum", "const", "default") else strictify(value) for key, value in schema.items()}
    if strict.get("additionalProperties") in ("true", "false"):
        strict["additionalProperties"] = strict["additionalProperties"] == "true"
    properties = schema.get("properties")
    # A property may itself be named "properties"; then its value is a schema, not a map of schemas.
    if isinstance(properties, dict) and all(isinstance(value, (dict, bool)) for value in properties.values()):
        strict["required"] = list(properties)
        strict["additionalProperties"] = False
    return strict


def _jsonschema() -> Any:
    try:
        import jsonschema
    except ImportError as error:
        raise UnsupportedError(
            "schema validation needs the jsonschema package", found=str(error), hints=("pip install jsonschema",)
        ) from error
    return jsonschema
