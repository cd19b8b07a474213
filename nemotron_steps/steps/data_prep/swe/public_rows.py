"""Rows in the shape of SWE-bench and SWE-Gym as prompts of `swe_agent`: every field kept, what a prompt lacks added."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from nemotron_steps.environments.registry import create
from nemotron_steps.environments.swe.harness import task_prompt
from nemotron_steps.errors import DataError, show_line
from nemotron_steps.rows.layouts import read_request
from nemotron_steps.rows.lines import Row
from nemotron_steps.steps.data_prep.blends.row_work import RowFunction
from nemotron_steps.steps.data_prep.swe.mining import AGENT


@dataclass(frozen=True)
class SweRows:
    """See RowWork."""

    def function(self) -> RowFunction:
        """See RowWork."""
        environment = create(AGENT)

        def become(where: str, row: Row) -> list[Row]:
            completed = complete(row, where)
            read_request(completed, where)
            environment.check_row(completed, where)
            return [completed]

        return become


def complete(row: Row, where: str) -> Row:
    """A row of SWE-bench with the fields that a prompt has. Fields within `instance_dict` come to the top.

    Raises:
        DataError: one of the objects that fields are looked for in is none.
    """
    params = _object(row.get("responses_create_params"), "responses_create_params", where)
    metadata = _object(params.get("metadata"), "responses_create_params.metadata", where)
    told = row.get("instance_dict") or metadata.get("instance_dict")
    nested = {**metadata, **_object(told, "instance_dict", where)}
    nested.pop("instance_dict", None)
    completed = {**nested, **row}
    if not params.get("input") and completed.get("problem_statement"):
        prompt = task_prompt(str(completed["problem_statement"]))
        params = {**params, "input": [{"role": "user", "content": prompt}]}
    agent = {"type": "responses_api_agents", "name": AGENT}
    return {"agent_ref": agent, **completed, "responses_create_params": params}


def _object(value: Any, field: str, where: str) -> dict[str, Any]:
    """An object, or one as JSON text; {} where there is none."""
    if not value:
        return {}
    try:
        found = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise DataError(
            f"`{field}` is not an object",
            where=f"{where} field {field}",
            expected="an object, or one as JSON text",
            found=repr(value)[:80],
            hints=show_line(where),
        )
    return found
