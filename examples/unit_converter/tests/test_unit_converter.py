from __future__ import annotations

import asyncio

from unit_converter.environment import UnitConverter, UnitConverterConfig

from nemotron_steps.environments.base import Response, Session
from nemotron_steps.testing import environment_conformance


def row(question: str, value: float, unit: str) -> dict:
    return {
        "responses_create_params": {"input": [{"role": "user", "content": question}]},
        "agent_ref": {"type": "responses_api_agents", "name": "unit_converter"},
        "expected_value": value,
        "expected_unit": unit,
    }


ROWS = [
    row("How many km are 5 miles? Answer like: 1.5 km", 8.04672, "km"),
    row("How many lb are 2 kg? Answer like: 1.5 lb", 4.409245, "lb"),
]

TestUnitConverter = environment_conformance(
    "unit_converter", rows=ROWS, answer=lambda row: f"{row['expected_value']} {row['expected_unit']}"
)


def test_the_tool_converts_and_its_calls_are_counted():
    async def outputs() -> list[str]:
        environment = UnitConverter(UnitConverterConfig(max_calls=2), {})
        session = await environment.seed(ROWS[0])
        calls = [(5, "mile", "km"), (5, "mile", "kg"), (5, "mile", "km")]
        return [
            await environment.call_tool(session, "convert", {"value": v, "source": s, "target": t}) for v, s, t in calls
        ]

    assert asyncio.run(outputs()) == [
        "8.04672 km",
        "error: mile is a length, kg a mass",
        "error: no calls are left",
    ]


def test_the_unit_and_the_relative_error_count():
    environment = UnitConverter(UnitConverterConfig(), {})
    answers = {"About 8.05 km.": 1.0, "8.05 mile": 0.0, "9 km": 0.0, "It is 8.04672": 0.0, "5 mile is **8.05 km**": 1.0}
    rewards = {
        text: asyncio.run(environment.verify(ROWS[0], Response.from_text(text), Session())).reward for text in answers
    }
    assert rewards == answers
