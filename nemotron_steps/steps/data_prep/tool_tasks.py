"""Made-up single-step tool-use rows: a request, a few tools, and the one call (or the refusal) that is right.

In the row shape of single_step_tool_use_with_argument_comparison, so whatever reads real rows reads these.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nemotron_steps.config.schema.tool_preferences import ToolTasksSource
from nemotron_steps.errors import DataError
from nemotron_steps.rows.lines import Row

NO_TOOL = "I have no tool for that."
AGENT = "single_step_tool_use_simple_agent"
_DRAWS_PER_ROW = 50

_VALUES: dict[str, tuple[str, ...]] = {
    "city": ("Paris", "Oslo", "Lima", "Cairo", "Kyoto", "Porto", "Quito", "Riga", "Dakar", "Perth", "Turin", "Bergen"),
    "day": ("today", "tomorrow", "Monday", "Friday", "Sunday"),
    "person": ("Ada", "Ben", "Chloe", "Dev", "Elif", "Femi", "Greta", "Hugo", "Ines", "Jun"),
    "text": ("running late", "all done here", "see you soon", "call me back", "lunch is ready", "well played"),
    "language": ("French", "Polish", "Hindi", "Swahili", "Danish", "Korean"),
    "song": ("Blue Moon", "Hey Jude", "Yesterday", "Imagine", "Clair de Lune", "Respect", "Halo"),
    "currency": ("EUR", "USD", "JPY", "GBP", "BRL"),
    "place": ("Luigi", "Sakura", "Taverna", "Bombay", "Le Coin"),
}


@dataclass(frozen=True)
class _Task:
    """One tool, and how people ask for it: `request` is formatted with the arguments."""

    name: str
    description: str
    request: str
    parameters: Mapping[str, str]
    """Argument → what kind of value it takes."""


_TASKS = (
    _Task("set_alarm", "Set an alarm", "Wake me at {time}.", {"time": "time"}),
    _Task("set_timer", "Start a timer", "Start a timer of {minutes} minutes.", {"minutes": "integer"}),
    _Task("get_weather", "Weather forecast", "Weather in {city} {day}?", {"city": "city", "day": "day"}),
    _Task("send_message", "Send a text message", "Tell {to}: {text}.", {"to": "person", "text": "text"}),
    _Task("play_song", "Play a song", "Play {title}.", {"title": "song"}),
    _Task(
        "convert_money",
        "Convert between currencies",
        "How much is {amount} {source} in {target}?",
        {"amount": "number", "source": "currency", "target": "currency"},
    ),
    _Task(
        "book_table",
        "Book a table",
        "Book a table at {place} for {people} at {time}.",
        {"place": "place", "people": "integer", "time": "time"},
    ),
    _Task("translate", "Translate a text", 'Say "{text}" in {language}.', {"text": "text", "language": "language"}),
    _Task(
        "find_flight",
        "Search for flights",
        "Flights from {origin} to {destination} {day}?",
        {"origin": "city", "destination": "city", "day": "day"},
    ),
)


def tool_rows(source: ToolTasksSource, count: int, seed: int) -> list[Row]:
    """`count` rows with different requests.

    Raises:
        DataError: there are not so many different requests.
    """
    rng = random.Random(f"{seed}:tool_tasks")
    rows: dict[str, Row] = {}
    for _ in range(_DRAWS_PER_ROW * count + 1000):
        if len(rows) == count:
            break
        row = _row(source, rng)
        rows.setdefault(row["responses_create_params"]["input"][0]["content"], row)
    if len(rows) < count:
        raise DataError(
            "there are too few different tool requests",
            where="rows",
            expected=str(count),
            found=str(len(rows)),
            hints=(f"rows.train={len(rows) // 2}",),
        )
    return list(rows.values())


def _row(source: ToolTasksSource, rng: random.Random) -> Row:
    task, *others = rng.sample(_TASKS, source.offered + 1)
    arguments = {name: _value(kind, rng) for name, kind in task.parameters.items()}
    answerable = rng.random() >= source.unanswerable_share
    offered = [task, *others[:-1]] if answerable else others
    rng.shuffle(offered)
    expected = (
        {"type": "function_call", "name": task.name, "arguments": json.dumps(arguments)}
        if answerable
        else {"type": "message", "content": NO_TOOL}
    )
    return {
        "responses_create_params": {
            "input": [{"role": "user", "content": task.request.format(**arguments)}],
            "tools": [_tool(t) for t in offered],
        },
        "expected_action": expected,
        "agent_ref": {"type": "responses_api_agents", "name": AGENT},
    }


def _value(kind: str, rng: random.Random) -> Any:
    if kind == "integer":
        return rng.randint(2, 90)
    if kind == "number":
        return rng.randint(10, 9999) / 10
    if kind == "time":
        return f"{rng.randint(6, 22)}:{rng.choice(('00', '15', '30', '45'))}"
    return rng.choice(_VALUES[kind])


def _tool(task: _Task) -> dict[str, Any]:
    types = {name: kind if kind in ("integer", "number") else "string" for name, kind in task.parameters.items()}
    return {
        "type": "function",
        "name": task.name,
        "description": task.description,
        "parameters": {
            "type": "object",
            "properties": {name: {"type": kind} for name, kind in types.items()},
            "required": list(types),
        },
    }
