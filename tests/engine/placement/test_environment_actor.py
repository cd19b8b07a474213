"""An environments' actor that is replaced, with actors that only note what they are asked."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from nemotron_steps.engine.placement import environment_actor
from nemotron_steps.engine.placement.environment_actor import PlacedEnvironmentSet


@pytest.fixture
def asked(monkeypatch):
    """(actor, method, further arguments) of every call."""

    async def answer(reference, worker):
        return reference

    async def is_dead(worker):
        return False

    monkeypatch.setattr(environment_actor, "answer", answer)
    monkeypatch.setattr(environment_actor, "result_of", lambda reference, worker, timeout_s=None: reference)
    monkeypatch.setattr(environment_actor, "_is_well", is_dead)
    monkeypatch.setattr(environment_actor, "stop_workers", lambda workers: None)
    return []


def actor_of(asked, name):
    return SimpleNamespace(name=name, call=lambda *call: asked.append((name, *call)))


def test_an_actor_that_replaces_another_is_told_all_that_the_first_was(asked):
    async def run():
        first = actor_of(asked, "first")
        environments = PlacedEnvironmentSet({}, {}, first, lambda: actor_of(asked, "second"))
        environments.get("mcqa")
        await environments.start()
        environment_actor.JudgesBehindHttp(environments).start_step("step 7")
        assert await environments.replaced(first)
        assert environments.worker.name == "second" and environments.restarts == 1

    asyncio.run(run())
    told = {name: [call[1:] for call in asked if call[0] == name] for name in ("first", "second")}
    assert [method for method, *_ in told["first"]] == ["add", "start", "start_step"]
    assert told["second"] == told["first"]


def test_whoever_learns_of_a_death_late_is_sent_to_the_actor_that_took_over(asked):
    async def run():
        first = actor_of(asked, "first")
        environments = PlacedEnvironmentSet({}, {}, first, lambda: actor_of(asked, "second"))
        assert await asyncio.gather(*(environments.replaced(first) for _ in range(3))) == [True] * 3
        assert await environments.replaced(first)
        assert environments.worker.name == "second" and environments.restarts == 1

    asyncio.run(run())
