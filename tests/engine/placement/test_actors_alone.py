"""Classes of actors as plain objects: what they do with what they are asked, without Ray."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from nemotron_steps.config.schema.policy import GenerationConfig
from nemotron_steps.config.schema.rl import ClusterConfig, VllmModelConfig
from nemotron_steps.engine.placement import environment_actor
from nemotron_steps.engine.placement.environment_actor import (
    EnvironmentWorker,
    HttpJudgeRecipe,
    PlacedEnvironment,
    copy_for,
)
from nemotron_steps.engine.placement.policy_worker import PolicyWorker, arrays_of, batch_of
from nemotron_steps.engine.placement.standalone import device_plan
from nemotron_steps.environments.base import Environment, EnvironmentConfig, GradeResult, Response, Session
from nemotron_steps.errors import ConfigError, StorageError, WorkerLostError
from tests.engine.engine_samples import random_batch


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


class Plain(Environment):
    """Without a state."""

    name = "plain"

    async def verify(self, row: Any, response: Response, session: Session) -> GradeResult:
        return GradeResult(0.5)


def test_a_sessions_state_stays_in_the_worker_until_it_is_released() -> None:
    worker = EnvironmentWorker({})

    async def run() -> None:
        await worker.add("c 0", Counting, EnvironmentConfig())
        (first, tools), (second, _) = [await worker.seed("c 0", {}) for _ in range(2)]
        assert tools == [{"name": "add"}] and first != second
        states = [worker._sessions[number].state for number in (first, second)]
        assert await worker.call_tool("c 0", second, "add", {"a": 1}) == f"{states[1]} add {{'a': 1}}"
        assert await worker.follow_up("c 0", {}, Response("x"), first) == f"{states[0]} x"
        verdicts = await worker.verify_group("c 0", {}, [Response("x")] * 3, [second, first, Session(state=99)])
        assert [verdict.components["state"] for verdict in verdicts] == [states[1], states[0], 99]
        kept = worker._sessions[first]
        await worker.release("c 0", first)
        assert kept.state == "released" and list(worker._sessions) == [second]

    asyncio.run(run())


class Home:
    """What a placed environment knows of its actor; the actor is an object here."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.restarts, self.lives = 0, 1
        self.worker: Any = self._new()

        async def answer(call: Any, worker: Any) -> Any:
            if worker.dead:
                raise WorkerLostError("gone")
            return await call

        monkeypatch.setattr(environment_actor, "answer", answer)

    def _new(self) -> Any:
        real = EnvironmentWorker({})
        asyncio.run(real.add("c", Counting, EnvironmentConfig()))
        asyncio.run(real.add("p", Plain, EnvironmentConfig()))

        def call(method: str, *arguments: Any) -> Any:
            async def made() -> Any:
                return await getattr(real, method)(*arguments)

            return _Unawaited(made)

        return SimpleNamespace(call=call, dead=False, real=real)

    async def replaced(self, lost: Any) -> bool:
        if not lost.dead:
            return False
        self.restarts += 1
        self.worker = await asyncio.to_thread(self._new)
        return True


class _Unawaited:
    """A call that may never be awaited."""

    def __init__(self, made: Any) -> None:
        self._made = made

    def __await__(self) -> Any:
        return self._made().__await__()


def test_what_has_no_state_is_asked_again_of_the_next_actor_and_a_lost_session_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    home: Any = Home(monkeypatch)
    stateful = PlacedEnvironment(Counting(EnvironmentConfig(), {}), home, "c")
    stateless = PlacedEnvironment(Plain(EnvironmentConfig(), {}), home, "p")
    assert (stateful.name, stateless.name, stateful.label) == ("counting", "plain", "c")

    async def run() -> None:
        session, plain = await stateful.seed({}), await stateless.seed({"responses_create_params": {}})
        assert session.state[0] == 0 and session.tools == [{"name": "add"}] and plain.state is None
        assert (await stateful.verify({}, Response("x"), session)).reward == 1.0
        assert await stateless.follow_up({}, Response("x"), plain) is None
        assert "add" in await stateful.call_tool(session, "add", {})
        home.worker.dead = True
        assert (await stateless.verify({}, Response("x"), plain)).reward == 0.5
        assert home.restarts == 1
        with pytest.raises(WorkerLostError, match="session of `counting` is lost"):
            await stateful.verify({}, Response("x"), session)
        await stateful.release(session)  # nobody has it any more
        again = await stateful.seed({})
        assert again.state[0] == 1
        await stateful.release(again)
        assert not home.worker.real._sessions

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


def test_a_recipe_builds_its_own_judge(monkeypatch: pytest.MonkeyPatch) -> None:
    built = []
    monkeypatch.setattr(
        "nemotron_steps.engine.setup.backends.build_judge", lambda *given, **more: built.append((given, more)) or "j"
    )
    config = VllmModelConfig(model="m")
    assert HttpJudgeRecipe("judge_model", config, 3).build() == "j"  # type: ignore[comparison-overlap]
    assert built == [(("judge_model", config), {"defer_to": None, "seed": 3})]


def test_a_batch_is_the_same_after_its_way_as_arrays() -> None:
    batch, _ = random_batch(rows=3, width=5, noise_in_padding=False)
    arrays = arrays_of(batch)
    assert arrays["teacher_logprobs"] is None and isinstance(arrays["input_ids"], np.ndarray)
    for array in arrays.values():
        if array is not None:
            array.setflags(write=False)
    back = batch_of(arrays)
    for name, value in vars(batch).items():
        assert getattr(back, name) is None if value is None else torch.equal(getattr(back, name), value)
    back.input_ids.fill_(7)
    assert not torch.equal(back.input_ids, batch.input_ids)


def test_a_rank_answers_with_what_teachers_add_and_tells_what_the_disk_refuses(tmp_path: Any) -> None:
    batch, _ = random_batch(rows=3, width=5, noise_in_padding=False)
    worker: Any = PolicyWorker()
    worker._answer = lambda answer: answer
    asked = []

    class Teachers:
        def score(self, given: Any, names: Any) -> Any:
            asked.append(names)
            given.teacher_logprobs = torch.ones(3, 5)
            return given

    worker._teachers = Teachers()
    scored = worker.score(arrays_of(batch), ["a", None, "b"])
    assert list(scored) == ["teacher_logprobs"] and asked == [["a", None, "b"]]

    def refused(*given: Any) -> None:
        raise OSError(28, "No space left on device")

    worker._policy = SimpleNamespace(save_checkpoint=refused, save_adapter=refused)
    for method, arguments in (("files", ("save_checkpoint", "p")), ("save_adapter", ("p", "b", "d"))):
        with pytest.raises(StorageError, match="writing failed") as caught:
            getattr(worker, method)(*arguments)
        assert caught.value.where == "p"
    written: list[str] = []
    worker._policy = SimpleNamespace(snapshot=lambda: SimpleNamespace(write=written.append))
    worker.snapshot()
    worker.write_snapshot("p")
    assert written == ["p"] and not hasattr(worker, "_snapshot")


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


def test_judges_without_nodes_of_their_own_have_no_devices_of_their_own() -> None:
    config = ClusterConfig.model_validate({"backend": "ray", "num_nodes": 1, "gpus_per_node": 2})
    plan = device_plan(config, GenerationConfig(), 0, {"judge_model": VllmModelConfig(model="m")})
    assert (plan.judge_devices, plan.bundles, sum(plan.judges.values())) == ((), [{"GPU": 1.0}] * 2, 1)


def test_without_a_gpu_for_a_generator_the_nodes_to_ask_for_are_said() -> None:
    generation = GenerationConfig.model_validate({"backend": "vllm", "vllm_cfg": {"tensor_parallel_size": 4}})
    config = ClusterConfig.model_validate({"backend": "ray", "num_nodes": 1, "gpus_per_node": 2})
    with pytest.raises(ConfigError, match="no generator has its GPUs") as caught:
        device_plan(config, generation, 0, {})
    assert caught.value.hints == ("cluster.num_nodes=1 cluster.gpus_per_node=4",)
