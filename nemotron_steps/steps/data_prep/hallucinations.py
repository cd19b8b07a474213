"""Tool calls that a model made up: variants of the right action that are wrong in one named way, with names and values
of other rows. What the environment would reward is not rejected."""

import asyncio
import json
import random
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from nemotron_steps.config.schema.tool_preferences import Hallucination
from nemotron_steps.environments.base import Response, Row, Session, ToolCall
from nemotron_steps.environments.tools.single_step_tool_use import (
    SingleStepToolUse,
    SingleStepToolUseConfig,
    expected_calls,
)

Calls = list[tuple[str, dict[str, Any]]]
"""(tool name, arguments) of every call of a turn."""

REDRAWS = 12
MOST_VALUES, LONGEST_VALUE = 2_000, 16_000
"""Values of one argument that may be borrowed, the first different ones, and the longest in characters of JSON."""


class HallucinationMaker:
    """Makes rejected actions."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self._grader = SingleStepToolUse(SingleStepToolUseConfig(), {})
        tools: set[str] = set()
        arguments: set[str] = set()
        values: dict[str, dict[str, Any]] = defaultdict(dict)
        for row in rows:
            for tool in tools_of(row):
                tools.add(tool["name"])
                arguments.update(properties_of(tool))
            for _, given in calls_of(row):
                for name, value in given.items():
                    text = json.dumps(value, sort_keys=True)
                    if len(values[name]) < MOST_VALUES and len(text) < LONGEST_VALUE:
                        values[name][text] = value
        # Sorted: what is drawn depends on the seed and the rows alone.
        self._tools = sorted(tools)
        self._arguments = sorted(arguments)
        self._values: dict[str, list[Any]] = defaultdict(list)
        self._values |= {name: [found[text] for text in sorted(found)] for name, found in values.items()}

    def make(self, kind: Hallucination, row: Row, rng: random.Random) -> Calls | None:
        """A rejected action of that kind; None where the row allows none."""
        for _ in range(REDRAWS):
            calls = self._needless_call(row, rng) if kind == "needless_call" else self._altered(kind, row, rng)
            if calls is None:
                return None
            response = Response("", tool_calls=[ToolCall(name, json.dumps(given)) for name, given in calls])
            if asyncio.run(self._grader.verify(row, response, Session())).reward == 0.0:
                return calls
        return None

    def _altered(self, kind: Hallucination, row: Row, rng: random.Random) -> Calls | None:
        calls = calls_of(row)
        if not calls:
            return None
        position = rng.randrange(len(calls))
        name, arguments = calls[position]
        offered = {tool["name"]: tool for tool in reversed(tools_of(row))}  # of two with one name the first
        if kind == "unknown_tool":
            foreign = [other for other in self._tools if other not in offered]
            variants = [f"{name}_now", f"find_{name}", f"{name}_details", *foreign]
            calls[position] = rng.choice([other for other in variants if other not in offered]), arguments
            return calls
        if name not in offered:
            return None
        if kind == "unknown_argument":
            known = {**properties_of(offered[name]), **arguments}
            extra = rng.choice([other for other in (*self._arguments, "priority", "note") if other not in known])
            changed = {**arguments, extra: rng.choice(self._values[extra] or ["high", 1, "urgent"])}
        elif kind == "missing_argument":
            needed = (offered[name].get("parameters") or {}).get("required") or ()
            required = [key for key in needed if key in arguments]
            if not required:
                return None
            dropped = rng.choice(required)
            changed = {key: value for key, value in arguments.items() if key != dropped}
        else:
            # Text and numbers; a flipped switch is a mistake, but nothing was made up.
            choices = [key for key, value in arguments.items() if value != "" and type(value) in (str, int, float)]
            if not choices:
                return None
            key = rng.choice(choices)
            said = json.dumps(row["responses_create_params"]["input"], ensure_ascii=False).lower()
            changed = {**arguments, key: self._invent(key, arguments[key], said, rng)}
        calls[position] = name, changed
        return calls

    def _invent(self, key: str, value: Any, said: str, rng: random.Random) -> Any:
        """Another value of the same type that the conversation does not contain."""
        borrowed = [v for v in self._values[key] if type(v) is type(value) and v != value]
        borrowed = [v for v in borrowed if str(v).lower() not in said]
        if borrowed and rng.random() < 0.8:
            return rng.choice(borrowed)
        if isinstance(value, int | float):
            return value + type(value)(rng.choice((-7, -3, 2, 5, 11, 100)))
        changed = re.sub(r"\d", lambda digit: str((int(digit.group()) + rng.randint(1, 9)) % 10), value)
        return changed if changed != value else f"{value}-{rng.randint(100, 999)}"

    def _needless_call(self, row: Row, rng: random.Random) -> Calls | None:
        if calls_of(row):
            return None
        tools = tools_of(row)
        if not tools:
            return [(rng.choice(self._tools or ["search"]), {})]
        tool = rng.choice(tools)
        needed = (tool.get("parameters") or {}).get("required") or ()
        properties = properties_of(tool)
        return [(tool["name"], {key: self._fill(key, properties.get(key) or {}, rng) for key in needed})]

    def _fill(self, key: str, schema: Mapping[str, Any], rng: random.Random) -> Any:
        if schema.get("enum"):
            return rng.choice(schema["enum"])
        kind = schema.get("type")
        if kind in ("integer", "number"):
            return rng.randint(1, 99)
        if kind == "boolean":
            return rng.random() < 0.5
        if kind in ("array", "object"):
            return [] if kind == "array" else {}
        return rng.choice([v for v in self._values[key] if isinstance(v, str)] or ["unknown"])


def tools_of(row: Row) -> list[dict[str, Any]]:
    """The function tools that a row offers."""
    tools = row["responses_create_params"].get("tools") or []
    return [tool for tool in tools if isinstance(tool, dict) and tool.get("name")]


def properties_of(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """JSON schemas of a tool's arguments."""
    return (tool.get("parameters") or {}).get("properties") or {}


def calls_of(row: Row) -> Calls:
    """The expected calls; empty when a message is expected."""
    if row["expected_action"]["type"] == "message":
        return []
    return [(call.name, dict(call.parsed_arguments() or {})) for call in expected_calls(row)]
