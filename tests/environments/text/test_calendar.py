import asyncio
import json
from typing import Any

import pytest

from nemotron_steps.environments.base import Response, Session
from nemotron_steps.environments.registry import create
from nemotron_steps.environments.text.calendar_events import bounds, minutes
from nemotron_steps.errors import DataError


def expected(identity: int, duration: int, constraint: str | None) -> dict[str, Any]:
    return {
        "event_id": identity,
        "duration": duration,
        "constraint": constraint,
        "min_time": "10:00",
        "max_time": "16:00",
    }


STATE = {"0": expected(0, 60, "between 10am and 11:45am"), "1": expected(1, 30, "at 2pm"), "2": expected(2, 30, None)}
GOOD = [(0, "10:30", 60), (1, "14:00", 30), (2, "14:30", 30)]


def text(events: list[tuple[Any, ...]]) -> str:
    return json.dumps([{"event_id": i, "event_name": f"e[{i}]", "start_time": s, "duration": d} for i, s, d in events])


def problem(answer: str, state: dict[str, Any] = STATE) -> Any:
    environment = create("calendar")
    row = {"responses_create_params": {"input": "Add."}, "exp_cal_state": state}
    environment.check_row(row, "f:1")
    verdict = asyncio.run(environment.verify(row, Response(answer), Session()))
    assert verdict.reward == float(verdict.details["problem"] is None)
    return verdict.details["problem"]


@pytest.mark.parametrize(
    ("answer", "wanted"),
    [
        (text(GOOD), None),
        (f"Here: {text(GOOD[:1])} and now\n```json\n{text(GOOD)}\n```", None),
        (text(GOOD[:2]), "different_number_of_events"),
        (text([GOOD[0], GOOD[1], (7, "14:30", 30)]), "event_missing"),
        (text([GOOD[0], GOOD[1], (2, "14:15", 30)]), "conflicting_events"),
        (text([GOOD[0], GOOD[1], (2, "14:30", 45)]), "wrong_duration"),
        (text([GOOD[0], GOOD[1], (2, "15:45", 30)]), "constraint_violated"),
        (text([(0, "11:00", 60), GOOD[1], GOOD[2]]), "constraint_violated"),
        (text([GOOD[0], GOOD[1], (2, "noon", 30)]), "malformed_event"),
        (text([GOOD[0], GOOD[1], (2, "14:30", "30")]), "malformed_event"),
        (text([GOOD[0], (1, "14:00", True), (2, "14:30", 30)]), "malformed_event"),
        (text([*GOOD, GOOD[2]]), "different_number_of_events"),
        (text([GOOD[2], GOOD[1], GOOD[0]]), None),
        (text([(0, "10:00", 60), GOOD[1], (2, "15:30", 30)]), None),  # to the minute, at both ends of their windows
        (text([(0, "10:46", 60), GOOD[1], GOOD[2]]), "constraint_violated"),
        (text([GOOD[0], GOOD[1], (2, "14:29", 30)]), "conflicting_events"),
        (text(GOOD) + ' [1] [] [{"a": 1}', None),  # the last list of objects
        (text(GOOD) + "</think>", "think_found"),
        ("no calendar", "no_event_list"),
        ("<think>" + text(GOOD), "think_found"),
    ],
)
def test_every_rule(answer: str, wanted: str | None) -> None:
    assert problem(answer) == wanted


def test_an_empty_calendar_takes_any_answer() -> None:
    assert problem("Hello!", {}) is None
    assert problem("", {}) == "no_answer"


def test_times_and_constraints() -> None:
    assert [minutes(t) for t in ("12am", "12pm", "1:45pm", "09:05", "12:30am")] == [0, 720, 825, 545, 30]
    assert [minutes(t) for t in ("24:00", "0:59", "11:59 pm", " 1 am ", "2pm")] == [1440, 59, 1439, 60, 840]
    for wrong in ("25:00", "24:01", "24:30", "10", "13pm", "0am", "", "10:75", "10:60", "at 10:00", "10:30 AM"):
        with pytest.raises(ValueError, match="not a time"):
            minutes(wrong)
    assert bounds(expected(0, 30, "before 1:45pm")) == (600, 825, None)
    assert bounds(expected(0, 30, "after 2pm")) == (840, 960, None)
    # The window is the tighter of the constraint's and the event's own.
    assert bounds(expected(0, 30, "before 5pm")) == bounds(expected(0, 30, "after 9am")) == (600, 960, None)
    assert bounds(expected(0, 30, "between 9am and 5pm")) == bounds(expected(0, 30, None)) == (600, 960, None)
    assert bounds(expected(0, 30, "between 11am and 1pm")) == (660, 780, None)
    assert bounds(expected(0, 30, "at 2pm")) == (600, 960, 840)


def test_unreadable_constraints_are_refused() -> None:
    with pytest.raises(DataError) as caught:
        problem("x", {"0": expected(0, 30, "around noon")})
    assert caught.value.where == "f:1 field exp_cal_state.0"
