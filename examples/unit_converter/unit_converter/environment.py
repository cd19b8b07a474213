"""Rewards a conversion of units; the policy may ask a tool.

A row has `responses_create_params.input` (the prompt), `expected_value` (number: what the conversion gives) and
`expected_unit` (text: the unit that the answer is in, one of UNITS). The last number of the answer counts.
"""

from __future__ import annotations

import math
import re
from typing import Any, ClassVar

from pydantic import Field

from nemotron_steps.environments.base import (
    Environment,
    EnvironmentConfig,
    GradeResult,
    Response,
    Row,
    RowError,
    Session,
)

UNITS: dict[str, tuple[str, float]] = {
    "m": ("length", 1.0),
    "km": ("length", 1000.0),
    "mile": ("length", 1609.344),
    "ft": ("length", 0.3048),
    "kg": ("mass", 1.0),
    "g": ("mass", 0.001),
    "lb": ("mass", 0.45359237),
}
"""Unit → what it measures, and how much of the first unit of its kind it is."""

TOOL: dict[str, Any] = {
    "type": "function",
    "name": "convert",
    "description": "Converts a value from one unit to another.",
    "parameters": {
        "type": "object",
        "properties": {
            "value": {"type": "number"},
            "source": {"type": "string", "enum": list(UNITS)},
            "target": {"type": "string", "enum": list(UNITS)},
        },
        "required": ["value", "source", "target"],
    },
}

_NUMBER = re.compile(r"[-+]?\d{1,20}(?:\.\d{1,20})?(?:e[-+]?\d{1,3})?")


class UnitConverterConfig(EnvironmentConfig):
    """Settings, under `env.nemo_gym.environments.unit_converter`."""

    relative_error: float = Field(0.01, gt=0, lt=1)
    """How far an answer may be off, as a share of the right value."""
    max_calls: int = Field(3, ge=1)
    """Calls of the tool that a rollout has."""


class UnitConverter(Environment):
    """1.0 for a number within the relative error that is followed by the unit, else 0.0."""

    name: ClassVar[str] = "unit_converter"
    required_fields: ClassVar[tuple[str, ...]] = ("expected_value", "expected_unit")
    config_class = UnitConverterConfig
    config: UnitConverterConfig

    def check_values(self, row: Row) -> None:
        """Refuse a row before the run starts."""
        if not _is_number(row["expected_value"]):
            raise RowError("expected_value", "a finite number", repr(row["expected_value"])[:80])
        if not isinstance(row["expected_unit"], str) or row["expected_unit"] not in UNITS:
            raise RowError("expected_unit", f"one of {', '.join(UNITS)}", repr(row["expected_unit"])[:80])

    async def seed(self, row: Row) -> Session:
        """The tool, and how many calls are left."""
        return Session(tools=[TOOL], state=self.config.max_calls)

    async def call_tool(self, session: Session, name: str, arguments: dict[str, Any]) -> str:
        """Convert. What the policy got wrong is told to it."""
        if name != "convert":
            return f"error: there is no tool `{name}`"
        if session.state == 0:
            return "error: no calls are left"
        session.state -= 1
        value, source, target = (arguments.get(key) for key in ("value", "source", "target"))
        if not _is_number(value):
            return "error: value is a number"
        if not isinstance(source, str) or not isinstance(target, str) or not {source, target} <= UNITS.keys():
            return f"error: source and target are each one of {', '.join(UNITS)}"
        (kind, size), (other, unit) = UNITS[source], UNITS[target]
        if kind != other:
            return f"error: {source} is a {kind}, {target} a {other}"
        return f"{value * size / unit:.6g} {target}"

    async def verify(self, row: Row, response: Response, session: Session) -> GradeResult:
        """Judge the last number of the answer, and the unit behind it."""
        # The end of an answer is what counts, and a bound on what is searched.
        text = response.text.strip()[-400:]
        found = list(_NUMBER.finditer(text))
        if not found:
            return GradeResult(0.0, {"no_number": 1.0})
        unit = text[found[-1].end() :].strip(" .*$").split(" ")[0]
        value = float(found[-1][0])
        right = unit == row["expected_unit"] and math.isclose(
            value, row["expected_value"], rel_tol=self.config.relative_error
        )
        return GradeResult(1.0 if right else 0.0, {"no_number": 0.0}, details={"value": value, "unit": unit[:20]})


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) < 1e30
