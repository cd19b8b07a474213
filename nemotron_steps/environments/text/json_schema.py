"""JSON Schema (draft 2020-12): is a schema one, does a value satisfy it, and the strict form of a schema."""

from typing import Any

from nemotron_steps.errors import UnsupportedError

DATA = ("enum", "const", "default")
"""Keywords whose values are data, not schemas."""
TOO_DEEP = "nested too deep"


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
        if TOO_DEEP in [problem_with(value, validator) for value in values]:
            return "it refers to itself without an end"
    except Exception as error:  # references that lead nowhere, regular expressions
        return str(error).partition("\n")[0][:200]
    return None


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
