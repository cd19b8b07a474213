"""What becomes of rollouts whose environment breaks: named, masked, reported; the others go on."""

import asyncio
import random
from typing import Any

import pytest

from nemotron_steps.engine.rollouts import turns
from nemotron_steps.engine.types import FinishReason
from nemotron_steps.environments.base import AgentRun, Environment, EnvironmentConfig, GradeResult, Session
from nemotron_steps.environments.judged.judges import JudgeLostError
from nemotron_steps.errors import JudgeUnavailableError
from tests.engine.rollouts.scripted import TOOL, Talk, a_call, collector_of, grouped
from tests.models.stock_chats import stock_chat

ROW = {"responses_create_params": {"input": "add"}}


class Breaks(Talk):
    """One member's `method` raises or returns `what`; the member is the third that gets a session."""

    def __init__(self, method: str, what: Any) -> None:
        super().__init__(random.Random(0), turns=2)
        self.method, self.what, self.seeded, self.released = method, what, 0, 0

    def _maybe(self, method: str, session: Session | None, result: Any) -> Any:
        broken = self.method == method and (session is None or session.state == "third")
        if broken and isinstance(self.what, Exception):
            raise self.what
        return self.what if broken else result

    async def seed(self, row) -> Session:
        self.seeded += 1
        if self.seeded == 3:
            return self._maybe("seed", None, Session(tools=[TOOL], state="third"))
        return Session(tools=[TOOL], state="")

    async def call_tool(self, session, name, arguments) -> str:
        return self._maybe("call_tool", session, "done")

    async def follow_up(self, row, response, session) -> str | None:
        return self._maybe("follow_up", session, None)

    async def verify(self, row, response, session) -> GradeResult:
        return self._maybe("verify", session, GradeResult(0.5))

    async def release(self, session) -> None:
        self.released += 1
        self._maybe("release", session, None)


def speaks(family):
    """A tool call, and then `yes`."""

    def speak(request, index):
        first = request.request_id.endswith("/0")
        return (a_call(family, index) if first else "yes"), True, FinishReason.STOP

    return speak


def collect(environment, records=None, row=ROW, family="qwen3", num_generations=4, **more):
    collector, _ = collector_of(stock_chat(family), speaks(family), records)
    return grouped(collector, environment, row, num_generations, **more)


def events(records):
    return [r["fields"] for r in records if r["kind"] == "event" and r["name"] == "rollout_failed"]


@pytest.mark.parametrize(
    ("method", "failure", "turns"),
    [
        ("seed", "seed_failed", 0),
        ("call_tool", "call_tool_failed", 1),
        ("follow_up", "follow_up_failed", 2),
    ],
)
def test_an_exception_fails_that_rollout_alone(method, failure, turns):
    records: list[Any] = []
    environment = Breaks(method, RuntimeError("broken row"))
    group = collect(environment, records)
    assert [r.failure for r in group.rollouts] == [None, None, failure, None]
    assert [r.index for r in group.rollouts] == [0, 1, 2, 3] and environment.released == 4 - (method == "seed")
    assert all(r.reward == 0.5 and len(r.turns) == 2 for r in group.rollouts if r.failure is None)
    broken = group.rollouts[2]
    assert broken.reward != broken.reward and len(broken.turns) == turns
    assert len(broken.token_ids) == len(broken.token_mask) == len(broken.logprobs)
    assert broken.metadata["message"] == "RuntimeError: broken row"
    (event,) = events(records)
    assert (event["environment"], event["failure"], event["where"]) == ("talk", failure, "rows.jsonl:8")
    assert event["rollouts"] == 1 and "raise self.what" in event["traceback"]


@pytest.mark.parametrize(
    ("method", "what", "failure"),
    [
        ("follow_up", 3, "follow_up_failed"),
        ("verify", GradeResult(1.5), "reward_out_of_range"),
        ("verify", JudgeUnavailableError("no answer"), "judge_unavailable"),
    ],
)
def test_what_a_method_must_not_return_fails_that_rollout_alone(method, what, failure):
    group = collect(Breaks(method, what))
    assert [r.failure for r in group.rollouts] == [None, None, failure, None]
    assert group.rollouts[2].metadata["message"]


def test_an_environment_that_does_not_answer_is_lost_for_that_rollout(monkeypatch):
    class Hangs(Breaks):
        async def call_tool(self, session, name, arguments):
            if session.state == "third":
                await asyncio.Event().wait()
            return "done"

    monkeypatch.setattr(turns, "ENVIRONMENT_SECONDS", 0.2)
    group = collect(Hangs("", None))
    assert [r.failure for r in group.rollouts] == [None, None, "environment_lost", None]


@pytest.mark.parametrize(
    ("family", "messages"),
    [
        ("qwen3.5", [{"role": "assistant", "content": "no question"}]),  # the template refuses it
        ("qwen3", [{"type": "function_call", "name": "add", "arguments": "{"}]),
    ],
)
def test_a_row_that_makes_no_prompt_fails_its_group_with_the_row_named(family, messages):
    records: list[Any] = []
    row = {"responses_create_params": {"input": messages}}
    group = collect(Talk(random.Random(0), 1), records, row, family)
    assert [r.failure for r in group.rollouts] == ["prompt_unusable"] * 4
    (event,) = events(records)
    assert event["where"] == "rows.jsonl:8" and event["rollouts"] == 4 and event["message"]


def test_the_generators_own_failure_and_a_dead_judge_end_the_run():
    class Dead(Talk):
        async def verify(self, row, response, session):
            raise JudgeLostError("the judge is dead")

    with pytest.raises(JudgeLostError):
        collect(Dead(random.Random(0), 1))
    collector, generator = collector_of(stock_chat("qwen3"), speaks("qwen3"))

    def dies():
        raise MemoryError("generator")

    generator.step = dies
    with pytest.raises(MemoryError, match="generator"):
        grouped(collector, Talk(random.Random(0), 1), ROW, 2)


class Agent(Environment):
    """An agent whose second rollout is `outcome`."""

    name = "agent"
    runs_agent = True

    def __init__(self, outcome: Any, eos: int) -> None:
        super().__init__(EnvironmentConfig(), {})
        self.outcome, self.eos, self.runs = outcome, eos, 0

    async def run_agent(self, row, sampling) -> AgentRun:
        self.runs += 1
        if self.runs == 2:
            if isinstance(self.outcome, Exception):
                raise self.outcome
            return self.outcome
        item = {"type": "message", "content": "yes", "prompt_token_ids": [5, 6], "generation_token_ids": [7, self.eos]}
        return AgentRun([{**item, "generation_log_probs": [-0.1, -0.2]}], GradeResult(1.0))

    async def verify(self, row, response, session) -> GradeResult:
        raise AssertionError


GOOD = {"prompt_token_ids": [5], "generation_token_ids": [7], "generation_log_probs": [-0.5], "type": "message"}


@pytest.mark.parametrize(
    ("outcome", "failure"),
    [
        (RuntimeError("crashed"), "run_agent_failed"),
        (AgentRun([{**GOOD, "content": "x"}], GradeResult(2.0)), "reward_out_of_range"),
        (AgentRun([{**GOOD, "content": 5}], GradeResult(1.0)), "agent_tokens_broken"),
        (AgentRun([], GradeResult.failed("environment_refused", message="no")), "environment_refused"),
    ],
)
def test_an_agent_that_breaks_fails_its_own_rollout_alone(outcome, failure):
    records: list[Any] = []
    environment = Agent(outcome, stock_chat("qwen3").tokenizer.eos_token_id)
    group = collect(environment, records, num_generations=3)
    assert [r.failure for r in group.rollouts] == [None, failure, None]
    assert [e["failure"] for e in events(records)] == [failure] and events(records)[0]["message"]
