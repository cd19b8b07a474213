"""structured_outputs: 1 if the answer parses in the row's format and satisfies the row's schema made strict (all
properties required, no others), else 0. With `response_mode: tool_call` the answer is the named tool's argument."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, get_args

from nemotron_steps.environments.base import (
    Environment,
    EnvironmentConfig,
    Response,
    Row,
    RowError,
    Session,
    Verdict,
)
from nemotron_steps.environments.grading_pool import GradingPool
from nemotron_steps.environments.text.json_schema import problem_with, schema_problem, strictify, validator_of
from nemotron_steps.environments.text.structured_formats import Format, FormatError, parse

if TYPE_CHECKING:
    from nemotron_steps.environments.judged.judges import Judge

INLINE_LENGTH = 10_000
"""Longer answers, and schemas with regular expressions of their own, are graded in a helper process."""


class StructuredOutputs(Environment):
    """See the module docstring.

    A row has `schema_str` (a JSON schema as text) and `schema_type` (json, yaml, xml, toml or csv).
    """

    name: ClassVar[str] = "structured_outputs"
    required_fields: ClassVar[tuple[str, ...]] = ("schema_str",)

    def __init__(self, config: EnvironmentConfig, judges: Mapping[str, Judge]) -> None:
        super().__init__(config, judges)
        self._pool = GradingPool(problem_of)

    async def close(self) -> None:
        """End the helper processes."""
        await self._pool.close()

    def check_values(self, row: Row) -> None:
        """The schema must be a valid JSON Schema and the format, json where none is named, a known one."""
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
        if _is_tool_call(row) and not row.get("tool_name"):
            raise RowError("tool_name", "the tool to call, since response_mode is tool_call", "none")

    async def verify(self, row: Row, response: Response, session: Session) -> Verdict:
        """1 or 0; `details` names what was wrong."""
        schema, key = str(row["schema_str"]), row.get("tool_payload_key") if _is_tool_call(row) else None
        if _is_tool_call(row):
            names = [call.name for call in response.tool_calls]
            if names != [row["tool_name"]]:
                wrong = f"expected one call of {row['tool_name']}, found {names}"[:300]
                return Verdict(0.0, {"parsed": 0.0}, details={"problem": wrong})
            text, kind = response.tool_calls[0].arguments, "json"
        else:
            text, kind = response.text, _format(row)
        if len(text) <= INLINE_LENGTH and '"pattern' not in schema:
            parsed, problem = problem_of(text, kind, schema, key, _is_tool_call(row))
        else:
            parsed, problem = await self._pool.call(text, kind, schema, key, _is_tool_call(row))
        return Verdict(float(problem is None), {"parsed": float(parsed)}, details={"problem": problem})


def problem_of(text: str, kind: str, schema_text: str, key: str | None, is_call: bool) -> tuple[bool, str | None]:
    """(whether a text is of its format, what is wrong with it or None).

    Args:
        text: the document, or a call's arguments.
        key: the only argument a call may have, whose value is graded; None for all of them as one object.
    """
    validator = _validator(schema_text)
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
def _validator(schema_text: str) -> Any:
    return validator_of(strictify(json.loads(schema_text)))


def _format(row: Row) -> str:
    return str(row.get("schema_type") or "json")


def _is_tool_call(row: Row) -> bool:
    return row.get("response_mode") == "tool_call"
