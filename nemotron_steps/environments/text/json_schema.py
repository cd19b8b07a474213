"""JSON Schema (draft 2020-12): is a schema one, does a value satisfy it, and the strict form of a schema."""

import re
from typing import Any

from nemotron_steps.errors import UnsupportedError

DATA = ("enum", "const", "default")
"""Keywords whose values are data, not schemas."""
TOO_DEEP = "nested too deep"


def schema_problem(schema: dict[str, Any]) -> str | None:
    """Why nothing can be validated against a schema, or None."""
    jsonschema = _jsonschema()
    from referencing.exceptions import Unresolvable
    from referencing.jsonschema import DRAFT202012

    try:
        jsonschema.Draft202012Validator.check_schema(schema)
        _refuse_unusable(schema, _registry().resolver_with_root(DRAFT202012.create_resource(schema)))
    except jsonschema.SchemaError as error:
        return str(error.message)[:200]
    except (Unresolvable, re.error) as error:
        return str(error)[:200]
    values: tuple[Any, ...] = (None, {}, [], "", 0)
    if any(validation_problem(value, schema) == TOO_DEEP for value in values):
        return "it refers to itself without an end"
    return None


def _refuse_unusable(schema: Any, resolver: Any) -> None:
    from referencing.jsonschema import DRAFT202012

    if isinstance(schema, list):
        for item in schema:
            _refuse_unusable(item, resolver)
    if not isinstance(schema, dict):
        return
    if isinstance(schema.get("$id"), str):
        resolver = resolver.in_subresource(DRAFT202012.create_resource(schema))
    for key, value in schema.items():
        if key in ("$ref", "$dynamicRef") and isinstance(value, str):
            resolver.lookup(value)
        elif key == "pattern" and isinstance(value, str):
            re.compile(value)
        elif key == "patternProperties" and isinstance(value, dict):
            for pattern in value:
                re.compile(pattern)
        if key not in DATA:
            _refuse_unusable(value, resolver)


def validation_problem(value: Any, schema: dict[str, Any]) -> str | None:
    """The first reason why `value` does not satisfy the schema, or None."""
    return problem_with(value, validator_of(schema))


def validator_of(schema: dict[str, Any]) -> Any:
    """What `problem_with` asks; it takes longer to make than to ask."""
    return _jsonschema().Draft202012Validator(schema, registry=_registry())


def problem_with(value: Any, validator: Any) -> str | None:
    """See validation_problem. Only the first: to collect every error takes far longer than to find one."""
    try:
        error = next(validator.iter_errors(value), None)
    except RecursionError:
        return TOO_DEEP
    return None if error is None else f"{error.json_path}: {error.message}"[:300]


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


def _registry() -> Any:
    """What a schema may refer to besides itself: the metaschemas, and nothing over the network."""
    from jsonschema_specifications import REGISTRY

    return REGISTRY


def _jsonschema() -> Any:
    try:
        import jsonschema
    except ImportError as error:
        raise UnsupportedError(
            "schema validation needs the jsonschema package", found=str(error), hints=("pip install jsonschema",)
        ) from error
    return jsonschema
