"""Several groups at a time through one collector: each has what was asked for it, and none disturbs another."""

import asyncio
import random
from typing import Any

from nemotron_steps.engine.rollouts.data import PromptRow
from nemotron_steps.engine.types import FinishReason
from nemotron_steps.environments.base import GradeResult, Session
from nemotron_steps.environments.judged.judges import JudgeLostError
from tests.engine.rollouts.scripted import TOOL, Talk, a_call, collector_of
from tests.models.stock_chats import stock_chat

FAMILY = "qwen3"


class ByRow(Talk):
    """As many turns as the row says; members from its `hangs` on wait for a tool for ever, if that is not None."""

    def __init__(self) -> None:
        super().__init__(random.Random(0), turns=1)
        self.seeded: dict[int, int] = {}
        self.released = self.waiting = 0

    async def seed(self, row) -> Session:
        number = self.seeded.get(row["number"], 0)
        self.seeded[row["number"]] = number + 1
        hangs = row.get("hangs") is not None and number >= row["hangs"]
        return Session(tools=[TOOL], state={"hangs": hangs, "left": row.get("questions", 0)})

    async def call_tool(self, session, name, arguments) -> str:
        if session.state["hangs"]:
            self.waiting += 1
            try:
                await asyncio.Event().wait()
            finally:
                self.waiting -= 1
        return "done"

    async def follow_up(self, row, response, session) -> str | None:
        session.state["left"] -= 1
        return "and then?" if session.state["left"] >= 0 else None

    async def verify(self, row, response, session) -> GradeResult:
        if row.get("judge") == "hangs":
            await asyncio.Event().wait()
        if row.get("judge") == "lost":
            raise JudgeLostError("the judge is dead")
        return GradeResult(0.5)

    async def release(self, session) -> None:
        self.released += 1


def speak(request, index):
    return (a_call(FAMILY, index) if request.request_id.endswith("/0") else "yes"), True, FinishReason.STOP


def prompts(*rows: dict[str, Any]) -> list[PromptRow]:
    asked = {"responses_create_params": {"input": "add"}}
    return [PromptRow(n, {**asked, "number": n, **row}, f"f:{n + 1}") for n, row in enumerate(rows)]


async def in_time(collecting: Any) -> Any:
    async with asyncio.timeout(20):
        return await collecting


def test_rollouts_that_are_not_over_by_the_deadline_fail_and_are_not_waited_for() -> None:
    collector, _ = collector_of(stock_chat(FAMILY), speak)
    environment = ByRow()

    async def collect() -> list[Any]:
        asked = {"group_ids": ["a", "b", "c"], "num_generations": 4, "environment": environment, "deadline_s": 2.0}
        groups = await in_time(collector.collect(prompts({}, {"hangs": 2}, {"judge": "hangs"}), **asked))
        await asyncio.sleep(0)
        assert environment.waiting == 0 and environment.released == 12
        return groups

    failures = [[r.failure for r in group.rollouts] for group in asyncio.run(collect())]
    assert failures == [[None] * 4, [None, None, "straggler", "straggler"], ["straggler"] * 4]
