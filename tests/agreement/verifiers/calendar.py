"""calendar."""

from __future__ import annotations

import json
import random
from typing import Any

from nemotron_steps.environments.text.calendar_events import bounds
from nemotron_steps.environments.text.extraction import json_values
from tests.agreement.answers import Items, mutated_value, pick, read, styled
from tests.agreement.compare import FINAL_MESSAGE, MASKED, Rule
from tests.agreement.gym import Gym


def rows(gym: Gym, rng: random.Random) -> list[dict[str, Any]]:
    found = read(gym.data("calendar"))
    nothing = {**found[0], "exp_cal_state": {}}
    # Rows with a prefix of the events: easier to solve, and each another state.
    shorter = [
        {**row, "exp_cal_state": dict(list(row["exp_cal_state"].items())[:count])}
        for row in found
        for count in (1, 2, 3)
    ]
    return [*found, *shorter, nothing]


def solved(state: dict[str, Any]) -> list[dict[str, Any]] | None:
    """Events that hold everything, found greedily in the order of their latest start; None where that fails."""
    limits = {key: bounds(event) for key, event in state.items()}
    order = sorted(state, key=lambda key: limits[key][2] if limits[key][2] is not None else limits[key][1])
    placed: list[tuple[int, int, str]] = []
    for key in sorted(order, key=lambda key: limits[key][2] is None):
        earliest, latest, exact = limits[key]
        length = state[key]["duration"]
        for start in [exact] if exact is not None else range(earliest, latest - length + 1, 15):
            if all(start + length <= begin or start >= end for begin, end, _ in placed):
                placed.append((start, start + length, key))
                break
        else:
            return None
    return [
        {"event_id": int(key), "event_name": f"Event {key}", "start_time": clock(start), "duration": end - start}
        for start, end, key in sorted(placed)
    ]


def clock(minutes: int) -> str:
    return f"{minutes // 60:02d}:{minutes % 60:02d}"


def answer(row: dict[str, Any], rng: random.Random) -> tuple[str, Items]:
    right = solved(row["exp_cal_state"]) or []
    kinds = {"right": 50, "another time": 15, "another duration": 5, "mutated": 15, "12 hours": 5}
    kinds |= {"an event less": 4, "wrapped": 2, "no list": 3, "no JSON": 3}
    kind = pick(rng, kinds) if right else pick(rng, {"right": 1, "no list": 1})
    events: Any = [dict(event) for event in right]
    if kind == "another time":
        rng.choice(events)["start_time"] = clock(rng.randrange(36, 68) * 15)
    elif kind == "another duration":
        rng.choice(events)["duration"] += rng.choice((-15, 15, 30))
    elif kind == "mutated":
        events = mutated_value(events, rng)
    elif kind == "12 hours":
        for event in events:
            hour, minute = map(int, event["start_time"].split(":"))
            half = "am" if hour < 12 else "pm"
            shown = f"{(hour - 1) % 12 + 1}:{minute:02d}"
            event["start_time"] = rng.choice((f"{shown}{half}", f"{shown} {half.upper()}"))
    elif kind == "an event less":
        events.pop()
    elif kind == "wrapped":
        events = {"events": events}
    core = json.dumps(events, indent=rng.choice((None, 2)))
    if kind == "no list":
        core = "I have put all of that into your calendar."
    elif kind == "no JSON":
        core = core.replace('"', "'")
    draft = json.dumps(right[:-1] or [{"event_id": 99, "start_time": "10:00", "duration": 15}])
    style, items = styled(core, draft, rng)
    return f"{kind}, {style}", items


def theirs(gym: Gym) -> Any:
    return gym.grader("calendar", "Calendar")


def lists(text: str) -> list[Any]:
    """The JSON lists in a text."""
    return [value for _, value in json_values(text, "[") if value]


RULES = (
    FINAL_MESSAGE,
    MASKED,
    Rule(
        "the last list of events counts (there the first that a regular expression finds), and in it an event that is"
        " listed twice is one too many and a duration is an integer",
        lambda answer: (
            answer.details.get("problem") in ("different_number_of_events", "malformed_event")
            or len(lists(answer.final)) > 1
            or answer.final.count("[") > 1
        ),
    ),
)
