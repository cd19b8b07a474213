from __future__ import annotations

import asyncio
from typing import Any

import pytest

from nemotron_steps.environments.environment_set import EnvironmentSet
from nemotron_steps.errors import DataError


def row(agent: str | None, **more: Any) -> dict[str, Any]:
    named = {} if agent is None else {"agent_ref": {"type": "responses_api_agents", "name": agent}}
    return {"responses_create_params": {"input": "hi"}, **named, **more}


MCQA = {"options": [{"A": "x"}], "expected_answer": "A"}


def test_rows_go_where_they_say_and_equal_settings_share_one_environment() -> None:
    options = {"one": {"environment": "mcqa"}, "two": {"environment": "mcqa", "grading_mode": "lenient_boxed"}}
    environments = EnvironmentSet(options, {})
    first, second = environments.route(row("one"), "f:1"), environments.route(row("two"), "f:2")
    assert first is not second and environments.route(row("one"), "f:3") is first
    assert environments.get("mcqa") is first
    assert environments.names == ("one", "two", "mcqa") and environments.needed_judges() == frozenset()
    with pytest.raises(DataError):
        environments.route(row("nobody"), "f:4")
    with pytest.raises(DataError, match="agent"):
        environments.route(row(None), "f:5")


def test_the_one_environment_of_all_rows_takes_rows_that_name_another_or_none() -> None:
    environments = EnvironmentSet({}, {}, only="mcqa")
    assert (
        environments.route(row("calendar"), "f:1") is environments.route(row(None), "f:2") is environments.get("mcqa")
    )


def test_rows_are_checked_by_who_grades_them() -> None:
    environments = EnvironmentSet({}, {})
    calendar = row("calendar", exp_cal_state={})
    options = {"named": {"environment": "mcqa"}}
    named = EnvironmentSet(options, {})
    assert named.check_rows([(row("named", **MCQA), "f:1"), (calendar, "f:2")]) == {"mcqa", "calendar"}
    assert environments.check_rows([(row("calendar", **MCQA), "f:1")], environment="mcqa") == {"mcqa"}
    with pytest.raises(DataError, match="f:7"):
        environments.check_rows([(row("calendar", exp_cal_state=3), "f:7")])


def test_the_policys_endpoint_is_offered_where_an_environment_can_use_it_and_settings_go_first() -> None:
    options = {"mine": {"environment": "remote_agent", "url": "http://h:1", "policy_model_name": "own"}}
    told = EnvironmentSet(options, {})
    told.offer_policy("http://127.0.0.1:9/v1", "policy")
    config: Any = told.get("mine").config
    assert (config.policy_base_url, config.policy_model_name) == ("http://127.0.0.1:9/v1", "own")
    assert "policy_base_url" not in type(told.get("mcqa").config).model_fields


def test_every_environment_created_is_started_and_closed() -> None:
    environments = EnvironmentSet({}, {})
    done: list[str] = []

    def noting(name: str, what: str) -> Any:
        async def note() -> None:
            done.append(f"{what} {name}")

        return note

    for name in ("mcqa", "calendar", "mcqa"):
        for what in ("start", "close"):
            setattr(environments.get(name), what, noting(name, what))

    async def run() -> None:
        await environments.start()
        await environments.close()

    asyncio.run(run())
    assert done == ["start mcqa", "start calendar", "close mcqa", "close calendar"]


def test_settings_are_the_same_in_any_order() -> None:
    settings = {"grading_mode": "lenient_boxed", "max_steps": 3}
    backwards = dict(reversed(settings.items()))
    options = {"one": {"environment": "mcqa", **settings}, "two": {"environment": "mcqa", **backwards}}
    environments = EnvironmentSet(options, {})
    assert environments.get("one") is environments.get("two")
