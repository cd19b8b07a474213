"""An environments' actor that is replaced, with actors that only note what they are asked."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from nemotron_steps.engine.placement import environment_actor
from nemotron_steps.engine.placement.environment_actor import (
    MAX_RESTARTS,
    EnvironmentWorker,
    PlacedEnvironmentSet,
)
from nemotron_steps.environments.base import Environment, EnvironmentConfig
from nemotron_steps.errors import WorkerLostError


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
    return SimpleNamespace(name=name, call=lambda *call: asked.append((name, *call)), lost=WorkerLostError)


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


@pytest.mark.parametrize(("died", "replaced"), [(MAX_RESTARTS - 1, True), (MAX_RESTARTS, False)])
def test_an_actor_is_replaced_so_many_times_and_no_more(asked, died, replaced):
    async def run():
        environments = PlacedEnvironmentSet({}, {}, actor_of(asked, "first"), lambda: actor_of(asked, "next"))
        environments.restarts = died
        if replaced:
            assert await environments.replaced(environments.worker)
        else:
            with pytest.raises(WorkerLostError, match=f"it has died {MAX_RESTARTS + 1} times"):
                await environments.replaced(environments.worker)
        assert environments.restarts == MAX_RESTARTS

    asyncio.run(run())


class Closing(Environment):
    """Notes that it is closed, and where."""

    name = "closing"
    runs_agent = True
    judges_groups = True
    reward_range = (-1.0, 2.0)
    closed = 0

    async def start(self):
        type(self).closed -= 1

    async def close(self):
        type(self).closed += 1

    async def verify(self, row, response, session):
        raise AssertionError


def test_environments_of_one_name_are_told_apart_and_those_that_run_agents_are_closed_here(asked, monkeypatch):
    options = {"one": {"environment": "mcqa"}, "two": {"environment": "mcqa", "max_steps": 2}}
    environments = PlacedEnvironmentSet(options, {}, actor_of(asked, "first"), lambda: None)
    assert environments.get("one") is environments.get("one") is not environments.get("two")
    assert len({label for _, _, label, *_ in asked}) == len(asked) == 2
    environments._environments["closing"] = Closing(EnvironmentConfig(), {})
    monkeypatch.setattr(Closing, "closed", 0)
    asyncio.run(environments.close())
    assert Closing.closed == 1 and asked[-1] == ("first", "close")

    async def lost(reference, worker):
        raise WorkerLostError("gone")

    monkeypatch.setattr(environment_actor, "answer", lost)
    asyncio.run(environments.close())  # nothing of it is left to close
    assert Closing.closed == 2


def test_a_worker_starts_and_closes_all_of_its_environments_and_tells_judges_behind_http_alone_the_step(monkeypatch):
    monkeypatch.setattr(Closing, "closed", 0)
    told = []

    class Http(environment_actor.HttpJudge):
        def __init__(self):
            pass

        def start_step(self, step):
            told.append(step)

    async def run():
        worker = EnvironmentWorker({"judge_model": SimpleNamespace(start_step=told.append), "genrm_model": Http()})
        for label in ("a", "b"):
            await worker.add(label, Closing, EnvironmentConfig())
        await worker.start()
        assert Closing.closed == -2
        await worker.close()
        await worker.start_step("7")

    asyncio.run(run())
    assert Closing.closed == 0 and told == ["7"]
