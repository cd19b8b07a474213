"""structured_outputs: 1 if the answer parses in the row's format and satisfies the row's schema made strict (all
properties required, no others), else 0. With `response_mode: tool_call` the answer is the named tool's argument."""

from __future__ import annotations

import json
from typing import Any, ClassVar, get_args

from nemotron_steps.environments.base import (
    Environment,
    Response,
    Row,
    RowError,
    Session,
    Verdict,
)
from nemotron_steps.environments.text.structured_formats import Format, FormatError, parse, strictify
from nemotron_steps.errors import UnsupportedError


class StructuredOutputs(Environment):
    """See the module docstring."""

    name: ClassVar[str] = "structured_outputs"
    required_fields: ClassVar[tuple[str, ...]] = ("schema_str", "schema_type")

    def check_values(self, row: Row) -> None:
        """The schema must be a valid JSON Schema and the format a known one."""
        if row["schema_type"] not in get_args(Format):
            raise RowError("schema_type", f"one of {', '.join(get_args(Format))}", repr(row["schema_type"]))
        try:
            schema = json.loads(row["schema_str"])
        except (ValueError, TypeError) as error:
            raise RowError("schema_str", "a JSON Schema as text", str(error)) from error
        if not isinstance(schema, dict):
            raise RowError("schema_str", "a JSON object", type(schema).__name__)
        problem = schema_problem(schema)
        if problem is not None:
            raise RowError("schema_str", "a valid JSON Schema", problem)
        if _is_tool_call(row) and not row.get("tool_name"):
            raise RowError("tool_name", "the tool to call, since response_mode is tool_call", "none")

    async def verify(self, row: Row, response: Response, session: Session) -> Verdict:
        """1 or 0; `details` names what was wrong."""
        schema = strictify(json.loads(row["schema_str"]))
        if _is_tool_call(row):
            value, problem = _payload(row, response)
        else:
            try:
                value, problem = parse(response.text, str(row["schema_type"]), schema), None
            except FormatError as error:
                value, problem = None, f"not {row['schema_type']}: {error}"
        parsed = problem is None
        if parsed:
            problem = validation_problem(value, schema)
        return Verdict(float(problem is None), {"parsed": float(parsed)}, details={"problem": problem})


def schema_problem(schema: dict[str, Any]) -> str | None:
    """Why a schema is no valid JSON Schema (draft 2020-12), or None."""
    jsonschema = _jsonschema()
    try:
        jsonschema.Draft202012Validator.check_schema(schema)
    except jsonschema.SchemaError as error:
        return str(error.message)[:200]
    return None


def validation_problem(value: Any, schema: dict[str, Any]) -> str | None:
    """Why `value` does not satisfy the schema, or None."""
    jsonschema = _jsonschema()
    error = jsonschema.exceptions.best_match(jsonschema.Draft202012Validator(schema).iter_errors(value))
    return None if error is None else f"{error.json_path}: {error.message}"[:300]


def _jsonschema() -> Any:
    try:
        import jsonschema
    except ImportError as error:
        raise UnsupportedError(
            "schema validation needs the jsonschema package", found=str(error), hints=("pip install jsonschema",)
        ) from error
    return jsonschema


def _is_tool_call(row: Row) -> bool:
    return row.get("response_mode") == "tool_call"


def _payload(row: Row, response: Response) -> tuple[Any, str | None]:
    calls = [call for call in response.tool_calls if call.name == row["tool_name"]]
    if len(response.tool_calls) != 1 or not calls:
        return None, f"expected one call of {row['tool_name']}, found {[call.name for call in response.tool_calls]}"
    arguments = calls[0].parsed_arguments()
    if arguments is None:
        return None, "the arguments are not a JSON object"
    key = row.get("tool_payload_key")
    if not key:
        return arguments, None
    if set(arguments) != {key}:
        return None, f"expected the one argument {key!r}, found {sorted(arguments)}"
    return arguments[key], None
