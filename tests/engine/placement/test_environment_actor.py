"""An environments' actor that is replaced, with actors that only note what they are asked."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from nemotron_steps.config.schema.policy import GenerationConfig
from nemotron_steps.config.schema.rl import ClusterConfig, VllmModelConfig
from nemotron_steps.engine.placement import environment_actor
from nemotron_steps.engine.placement.environment_actor import (
    MAX_RESTARTS,
    EnvironmentWorker,
    Place,
    PlacedEnvironmentSet,
    copy_for,
)
from nemotron_steps.engine.placement.standalone import device_plan
from nemotron_steps.environments.base import Environment, EnvironmentConfig, GradeResult, Response, Session
from nemotron_steps.errors import ConfigError, WorkerLostError


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


class Counting(Environment):
    """With a state, a tool and a question; 1 for its own sessions' number."""

    name = "counting"
    seeds = 0

    async def seed(self, row: Any) -> Session:
        Counting.seeds += 1
        return Session(tools=[{"name": "add"}], state=Counting.seeds)

    async def release(self, session: Session) -> None:
        session.state = "released"

    async def call_tool(self, session: Session, name: str, arguments: dict[str, Any]) -> str:
        return f"{session.state} {name} {arguments}"

    async def follow_up(self, row: Any, response: Response, session: Session) -> str | None:
        return f"{session.state} {response.text}"

    async def verify(self, row: Any, response: Response, session: Session) -> GradeResult:
        return GradeResult(1.0, {"state": float(session.state)})


def test_a_sessions_state_stays_in_the_worker_until_it_is_released() -> None:
    worker = EnvironmentWorker({})

    async def run() -> None:
        await worker.add("c 0", Counting, EnvironmentConfig())
        (first, tools), (second, _) = [await worker.seed("c 0", {}) for _ in range(2)]
        assert tools == [{"name": "add"}] and first != second
        states = [worker._sessions[number].state for number in (first, second)]
        here = [Place(0, number) for number in (first, second)]
        assert await worker.ask("c 0", "call_tool", here[1], "add", {"a": 1}) == f"{states[1]} add {{'a': 1}}"
        assert await worker.ask("c 0", "follow_up", {}, Response("x"), here[0]) == f"{states[0]} x"
        sessions = [here[1], here[0], Session(state=99)]
        verdicts = await worker.ask("c 0", "judge_group", {}, [Response("x")] * 3, sessions)
        assert [verdict.components["state"] for verdict in verdicts] == [states[1], states[0], 99]
        kept = worker._sessions[first]
        await worker.release("c 0", first)
        assert kept.state == "released" and list(worker._sessions) == [second]

    asyncio.run(run())


def test_a_copy_of_a_judge_is_chosen_by_the_question_alone() -> None:
    questions = [[{"role": "user", "content": str(n)}] for n in range(200)]
    chosen = [copy_for(question, 4) for question in questions]
    assert chosen == [copy_for([dict(reversed(q[0].items()))], 4) for q in questions]
    assert {copy_for(question, 1) for question in questions} == {0}
    assert [30 < chosen.count(copy) < 70 for copy in range(4)] == [True] * 4
    assert [copy_for(question, 4) for question in questions[:8]] == CHOSEN


CHOSEN = [2, 3, 2, 2, 2, 3, 3, 0]
"""A resumed run asks the copies that the first one asked, also after an update of this package."""


@pytest.mark.parametrize(
    ("cluster", "width", "judge_nodes", "generators", "bundles"),
    [
        ({"num_nodes": 1, "gpus_per_node": 4}, 1, 0, 4, [1.0] * 4),
        ({"num_nodes": 1, "gpus_per_node": 5}, 2, 0, 2, [2.0] * 2),
        ({"num_nodes": 3, "gpus_per_node": 4}, 2, 1, 4, [2.0] * 4 + [1.0] * 4),
        ({"num_nodes": 1, "gpus_per_node": 0, "policy_workers": 3}, 1, 0, 3, None),
        ({"num_nodes": 1, "gpus_per_node": 0}, 1, 0, 1, None),
    ],
)
def test_generators_have_the_gpus_that_are_not_kept_for_judges(
    cluster: dict[str, Any], width: int, judge_nodes: int, generators: int, bundles: list[float] | None
) -> None:
    generation = GenerationConfig.model_validate({"backend": "vllm", "vllm_cfg": {"tensor_parallel_size": width}})
    config = ClusterConfig.model_validate({"backend": "ray", **cluster})
    local = {"judge_model": VllmModelConfig(model="m")} if judge_nodes else {}
    plan = device_plan(config, generation, judge_nodes, local)
    assert (plan.generators, plan.width, plan.policy, plan.gpus) == (generators, width, 0, bundles is not None)
    assert plan.bundles == ([{}] * generators if bundles is None else [{"GPU": size} for size in bundles])


def test_without_a_gpu_for_a_generator_the_nodes_to_ask_for_are_said() -> None:
    generation = GenerationConfig.model_validate({"backend": "vllm", "vllm_cfg": {"tensor_parallel_size": 4}})
    config = ClusterConfig.model_validate({"backend": "ray", "num_nodes": 1, "gpus_per_node": 2})
    with pytest.raises(ConfigError, match="no generator has its GPUs") as caught:
        device_plan(config, generation, 0, {})
    assert caught.value.hints == ("cluster.num_nodes=1 cluster.gpus_per_node=4",)
