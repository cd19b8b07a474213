"""Recorded rollouts graded again: which row they are of, which go together, and when two rewards agree."""

import asyncio
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest

from nemotron_steps.environments import recorded
from nemotron_steps.environments.base import (
    Environment,
    EnvironmentConfig,
    GradeResult,
    Response,
    Row,
    Session,
)
from nemotron_steps.environments.judged.judges import JudgeLostError
from nemotron_steps.environments.recorded import Regraded, regrade
from nemotron_steps.environments.responses import message_item
from nemotron_steps.errors import DataError


def rollout(question: str = "q", answer: str = "a", **more: Any) -> dict[str, Any]:
    request = {"responses_create_params": {"input": question}}
    return {**request, "response": {"output": [message_item(answer)]}, "reward": 1.0, **more}


class Grader(Environment):
    """1 for `a`; notes what it is given, and what it is told to do."""

    name: ClassVar[str] = "grader"

    def __init__(self, *, groups: bool = False, agent: bool = False) -> None:
        super().__init__(EnvironmentConfig(), {})
        self.judges_groups, self.runs_agent = groups, agent  # type: ignore[misc]
        self.seen: list[list[str]] = []
        self.done: list[str] = []

    async def start(self) -> None:
        self.done.append("start")

    async def release(self, session: Session) -> None:
        self.done.append("release")

    async def close(self) -> None:
        self.done.append("close")

    async def verify(self, row: Row, response: Response, session: Session) -> GradeResult:
        raise AssertionError("groups are judged")

    async def verify_group(
        self, row: Row, responses: Sequence[Response], sessions: Sequence[Session]
    ) -> list[GradeResult]:
        self.seen.append([f"{r.text}{'!' if r.truncated else ''}" for r in responses])
        return [GradeResult(float(r.text == "a")) for r in responses]


def graded(environment: Grader, rollouts: list[dict[str, Any]]) -> list[Regraded]:
    async def run() -> list[Regraded]:
        return [each async for each in regrade(environment, [(r, f"f:{n}") for n, r in enumerate(rollouts)])]

    return asyncio.run(run())


def test_every_rollout_is_graded_in_its_order_and_the_environment_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "_AT_ONCE", 2)
    environment = Grader()
    cut = rollout(answer="a")
    cut["response"]["incomplete_details"] = {"reason": "max_output_tokens"}
    found = graded(environment, [rollout(answer="b"), rollout(), rollout(), cut, rollout(answer="b", reward=None)])
    assert [each.where for each in found] == [f"f:{n}" for n in range(5)]
    assert [(each.recorded, each.verdict.reward) for each in found] == [(1, 0), (1, 1), (1, 1), (1, 1), (None, 0)]
    assert environment.seen == [["b"], ["a"], ["a"], ["a!"], ["b"]]
    assert environment.done == ["start", *["release"] * 5, "close"]


def test_what_is_graded_beside_a_rollout_that_fails_ends_before_the_environment_closes() -> None:
    environment = Grader()

    async def judge(row: Row, responses: Sequence[Response], sessions: Sequence[Session]) -> list[GradeResult]:
        if responses[0].text == "b":
            raise JudgeLostError("gone")
        await asyncio.sleep(30)
        raise AssertionError("it was not broken off")

    environment.verify_group = judge  # type: ignore[method-assign]
    with pytest.raises(JudgeLostError):
        graded(environment, [rollout(), rollout(answer="b"), rollout()])
    assert environment.done == ["start", *["release"] * 3, "close"]


@pytest.mark.parametrize(
    ("groups", "seen"), [(True, [["a", "b"], ["c"], ["d", "e"], ["f"]]), (False, [[text] for text in "abcdef"])]
)
def test_neighbours_of_one_prompt_are_judged_together_where_groups_are(groups: bool, seen: list[list[str]]) -> None:
    environment = Grader(groups=groups)
    rollouts = [
        rollout("q", "a"), rollout("q", "b"), rollout("other", "c"),
        rollout("q", "d", _ng_task_index=1), rollout("other", "e", _ng_task_index=1), rollout("q", "f"),
    ]  # fmt: skip
    graded(environment, rollouts)
    assert environment.seen == seen


@pytest.mark.parametrize(
    ("change", "recorded_reward"),
    [
        ({"reward": None}, None),
        ({"mask_sample": True}, None),
        ({"instance_config": {"mask_sample": True}}, None),
        ({"instance_config": "x"}, 1.0),
    ],
)
def test_a_masked_recording_has_no_reward(change: dict[str, Any], recorded_reward: float | None) -> None:
    assert graded(Grader(), [rollout(**change)])[0].recorded == recorded_reward


@pytest.mark.parametrize(
    "reward",
    [True, "1", float("nan"), float("inf"), -1e39, pytest.param(10**400, id="400"), pytest.param(10**5000, id="5000")],
)
def test_a_recorded_reward_that_is_no_finite_float32_is_refused_with_its_line(reward: Any) -> None:
    with pytest.raises(DataError, match="must be a finite float32") as caught:
        graded(Grader(), [rollout(reward=reward)])
    assert caught.value.where == "f:0 field reward"


def test_a_recorded_rollout_has_the_session_of_one_whose_tools_were_called_elsewhere() -> None:
    class Replays(Grader):
        async def seed(self, row: Row) -> Session:
            raise AssertionError("nothing is called here")

        async def seed_recorded(self, row: Row) -> Session:
            return Session()

    assert graded(Replays(), [rollout()])[0].verdict.reward == 1.0
