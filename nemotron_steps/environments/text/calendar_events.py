"""calendar: the last calendar an answer prints must hold exactly the expected events, without conflicts, each with its
duration, inside its window and honouring its constraint."""

import re
from itertools import pairwise
from typing import Any, ClassVar

from nemotron_steps.environments.base import Environment, GradeResult, Row, RowError, Session
from nemotron_steps.environments.responses import THINK_CLOSE, THINK_OPEN, Response
from nemotron_steps.environments.text.extraction import json_values

_CLOCK = re.compile(r"(\d{1,2})(?::(\d{2}))?\s*(am|pm)?")

Event = dict[str, Any]


class CalendarEvents(Environment):
    """See the module docstring. A row has `exp_cal_state`: event id → its duration, window and constraint."""

    name: ClassVar[str] = "calendar"
    required_fields: ClassVar[tuple[str, ...]] = ("exp_cal_state",)

    def check_values(self, row: Row) -> None:
        state = row["exp_cal_state"]
        if not isinstance(state, dict):
            raise RowError("exp_cal_state", "an object of event id → event", type(state).__name__)
        for key, event in state.items():
            try:
                bounds(event)
            except (ValueError, KeyError, TypeError) as error:
                expected = "duration, min_time, max_time, constraint"
                raise RowError(f"exp_cal_state.{key}", expected, repr(error)) from error

    async def verify(self, row: Row, response: Response, session: Session) -> GradeResult:
        """1 if everything holds, else 0; `problem` in the details says what does not."""
        problem = _problem(response.text, row["exp_cal_state"])
        return GradeResult(float(problem is None), details={"problem": problem})


def _problem(text: str, expected: dict[str, Event]) -> str | None:
    if THINK_OPEN in text or THINK_CLOSE in text:
        return "think_found"
    if not expected:
        return None if text.strip() else "no_answer"
    events: list[Event] = []
    for _, found in json_values(text, "["):
        if found and all(isinstance(item, dict) for item in found):
            events = found
    if not events:
        return "no_event_list"
    try:
        spans = {str(event["event_id"]): (minutes(event["start_time"]), event["duration"]) for event in events}
    except (KeyError, ValueError, TypeError):
        return "malformed_event"
    if len(spans) != len(events) or len(spans) != len(expected):
        return "different_number_of_events"
    if any(isinstance(length, bool) or not isinstance(length, int) or length <= 0 for _, length in spans.values()):
        return "malformed_event"
    ordered = sorted(spans.values())
    if any(start + length > after for (start, length), (after, _) in pairwise(ordered)):
        return "conflicting_events"
    for key, event in expected.items():
        if key not in spans:
            return "event_missing"
        start, length = spans[key]
        earliest, latest_end, exact = bounds(event)
        if length != event["duration"]:
            return "wrong_duration"
        if start < earliest or start + length > latest_end or (exact is not None and start != exact):
            return "constraint_violated"
    return None


def bounds(event: Event) -> tuple[int, int, int | None]:
    """(earliest start, latest end, exact start or None) in minutes, from an expected event's window and constraint."""
    if not isinstance(event["duration"], int):
        raise TypeError("duration is not an integer")
    earliest, latest = minutes(event["min_time"]), minutes(event["max_time"])
    constraint = event["constraint"]
    if constraint is None:
        return earliest, latest, None
    word, _, rest = str(constraint).partition(" ")
    if word == "at":
        return earliest, latest, minutes(rest)
    begin, _, end = rest.partition(" and ") if word == "between" else (rest, "", rest)
    if word not in ("before", "after", "between"):
        raise ValueError(f"unknown constraint {constraint!r}")
    earliest = earliest if word == "before" else max(earliest, minutes(begin))
    return earliest, latest if word == "after" else min(latest, minutes(end)), None


def minutes(clock: str) -> int:
    """Minutes since midnight of "14:05", "2:05pm" or "2pm"."""
    match = _CLOCK.fullmatch(clock.strip()) if isinstance(clock, str) else None
    if match is None or (match.group(2) is None and match.group(3) is None):
        raise ValueError(f"not a time: {clock!r}")
    hour, minute, half = int(match.group(1)), int(match.group(2) or 0), match.group(3) or ""
    if half:
        if not 1 <= hour <= 12:
            raise ValueError(f"not a time: {clock!r}")
        hour = hour % 12 + (12 if half == "pm" else 0)
    if hour * 60 + minute > 24 * 60 or minute > 59:  # 24:00 is the end of the day
        raise ValueError(f"not a time: {clock!r}")
    return hour * 60 + minute
