"""What becomes of rollouts whose environment breaks: named, masked, reported; the others go on."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from nemotron_steps.engine.generation.sampler import AsyncSampler
from nemotron_steps.engine.rollouts import failures
from nemotron_steps.engine.rollouts.collector import RolloutCollector, StragglerError
from nemotron_steps.engine.rollouts.data import PromptRow
from nemotron_steps.engine.rollouts.failures import REPORTED
from nemotron_steps.engine.rollouts.turns import Trajectory
from nemotron_steps.engine.types import Completion, FinishReason, SamplingParams
from nemotron_steps.environments.base import AgentRun, Environment, EnvironmentConfig, GradeResult, Session
from nemotron_steps.environments.environment_set import EnvironmentSet
from nemotron_steps.environments.judged.judges import JudgeLostError
from nemotron_steps.errors import JudgeUnavailableError
from nemotron_steps.runs.context import Tracker
from tests.engine.engine_samples import rollout
from tests.engine.rollouts.scripted import TOOL, ScriptedGenerator, Talk, a_call, cut_once
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


def collector_of(family="qwen3", records=None):
    chat = stock_chat(family)

    def speak(request, index):
        first = request.request_id.endswith("/0")
        return (a_call(family, index) if first else "yes"), True, FinishReason.STOP

    generator = ScriptedGenerator(chat, speak)
    return RolloutCollector(
        AsyncSampler(generator),
        chat,
        EnvironmentSet({}, {}),
        SamplingParams(max_new_tokens=99, stop_token_ids=(chat.tokenizer.eos_token_id,)),
        max_total_length=4000,
        max_turns=3,
        reporter=None if records is None else Tracker("test", None, records.append),
    )


def collect(environment, records=None, row=ROW, family="qwen3", num_generations=4):
    collector = collector_of(family, records)
    prompt = PromptRow(7, row, "rows.jsonl:8")
    return asyncio.run(
        collector.collect_group(prompt, group_id="g", num_generations=num_generations, environment=environment)
    )


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


def test_an_answer_that_verify_raises_over_earns_the_least_and_is_reported():
    records: list[Any] = []
    group = collect(Breaks("verify", RuntimeError("odd answer")), records)
    assert [(r.failure, r.reward) for r in group.rollouts] == [(None, 0.5), (None, 0.5), (None, 0.0), (None, 0.5)]
    assert group.rollouts[2].metadata["message"] == "RuntimeError: odd answer"
    (event,) = events(records)
    assert (event["failure"], event["rollouts"]) == ("grader_failed", 1) and "raise self.what" in event["traceback"]


@pytest.mark.parametrize(
    ("method", "what", "failure"),
    [
        ("seed", {"tools": []}, "seed_failed"),
        ("call_tool", {"sum": 3}, "call_tool_failed"),
        ("follow_up", 3, "follow_up_failed"),
        ("verify", 0.5, "verdict_invalid"),
        ("verify", GradeResult(1.5), "reward_out_of_range"),
        ("verify", JudgeUnavailableError("no answer"), "judge_unavailable"),
        ("call_tool", JudgeUnavailableError("no answer"), "judge_unavailable"),
    ],
)
def test_what_a_method_must_not_return_fails_that_rollout_alone(method, what, failure):
    group = collect(Breaks(method, what))
    assert [r.failure for r in group.rollouts] == [None, None, failure, None]
    assert group.rollouts[2].metadata["message"]


def test_a_session_that_cannot_be_released_is_reported_and_its_rollout_is_none_the_worse():
    records: list[Any] = []
    environment = Breaks("release", OSError("gone"))
    group = collect(environment, records)
    assert [r.failure for r in group.rollouts] == [None] * 4 and environment.released == 4
    assert [e["failure"] for e in events(records)] == ["release_failed"]


def test_a_group_that_cannot_be_judged_together_fails_as_a_whole():
    class Group(Breaks):
        async def verify_group(self, row, responses, sessions):
            raise ZeroDivisionError("no scores")

    records: list[Any] = []
    group = collect(Group("seed", RuntimeError("no room")), records)
    failures = ["verify_failed", "verify_failed", "seed_failed", "verify_failed"]
    assert [r.failure for r in group.rollouts] == failures
    assert {e["failure"]: e["rollouts"] for e in events(records)} == {"verify_failed": 3, "seed_failed": 1}


def test_an_environment_that_does_not_answer_is_lost_for_that_rollout(monkeypatch):
    class Hangs(Breaks):
        async def call_tool(self, session, name, arguments):
            if session.state == "third":
                await asyncio.Event().wait()
            return "done"

    monkeypatch.setattr(failures, "ENVIRONMENT_SECONDS", 0.2)
    group = collect(Hangs("", None))
    assert [r.failure for r in group.rollouts] == [None, None, "environment_lost", None]


def test_a_timeout_of_the_environments_own_is_its_failure_and_no_loss():
    class Slow(Breaks):
        async def call_tool(self, session, name, arguments):
            if session.state == "third":
                raise TimeoutError("the database did not answer in 5 s")
            return "done"

    group = collect(Slow("", None))
    assert [r.failure for r in group.rollouts] == [None, None, "call_tool_failed", None]
    assert "the database did not answer in 5 s" in group.rollouts[2].metadata["message"]


def test_nobody_is_asked_to_judge_a_group_of_which_nothing_is_left():
    class Broken(Breaks):
        async def call_tool(self, session, name, arguments):
            raise ConnectionError("refused")

        async def judge_group(self, row, responses, sessions):
            judged.append(responses)
            return [GradeResult(0.5) for _ in responses]

    judged: list[Any] = []
    group = collect(Broken("", None))
    assert {r.failure for r in group.rollouts} == {"call_tool_failed"} and not judged


def test_a_dead_environment_fails_its_group_without_a_sample():
    class Dead(Talk):
        async def seed(self, row):
            raise ConnectionError("refused")

    group = collect(Dead(random.Random(0), 1))
    assert [r.failure for r in group.rollouts] == ["seed_failed"] * 4
    assert all(r.token_mask == [0] and not r.weight_versions for r in group.rollouts)


@pytest.mark.parametrize(
    ("family", "messages"),
    [
        ("qwen3.5", [{"role": "assistant", "content": "no question"}]),  # the template refuses it
        ("qwen3", [{"type": "function_call", "name": "add", "arguments": "{"}]),
        ("qwen3", [{"content": "no role"}]),
    ],
)
def test_a_row_that_makes_no_prompt_fails_its_group_with_the_row_named(family, messages):
    records: list[Any] = []
    row = {"responses_create_params": {"input": messages}}
    group = collect(Talk(random.Random(0), 1), records, row, family)
    assert [r.failure for r in group.rollouts] == ["prompt_unusable"] * 4
    (event,) = events(records)
    assert event["where"] == "rows.jsonl:8" and event["rollouts"] == 4 and event["message"]


def test_results_that_the_template_refuses_fail_that_rollout(monkeypatch):
    collector = collector_of()

    def refuse(*args, **kwargs):
        raise ValueError("the template stumbles")

    monkeypatch.setattr(collector._chat, "render_continuation", refuse)
    prompt = PromptRow(7, ROW, "rows.jsonl:8")
    group = asyncio.run(
        collector.collect_group(prompt, group_id="g", num_generations=2, environment=Talk(random.Random(0), 1))
    )
    assert [(r.failure, len(r.turns)) for r in group.rollouts] == [("prompt_unusable", 1)] * 2


def test_a_prompt_without_room_is_reported_with_its_length():
    records: list[Any] = []
    collector = collector_of(records=records)
    collector.max_total_length = 5
    prompt = PromptRow(7, ROW, "rows.jsonl:8")
    group = asyncio.run(
        collector.collect_group(prompt, group_id="g", num_generations=2, environment=Talk(random.Random(0), 1))
    )
    assert [(r.failure, r.truncated) for r in group.rollouts] == [("prompt_too_long", True)] * 2
    assert "tokens, of 5" in events(records)[0]["message"]


def test_the_generators_own_failure_and_a_dead_judge_end_the_run():
    class Dead(Talk):
        async def verify(self, row, response, session):
            raise JudgeLostError("the judge is dead")

    with pytest.raises(JudgeLostError):
        collect(Dead(random.Random(0), 1))
    collector = collector_of()

    def dies():
        raise MemoryError("generator")

    collector._sampler.generator.step = dies
    with pytest.raises(MemoryError, match="generator"):
        asyncio.run(
            collector.collect_group(
                PromptRow(0, ROW, "row"), group_id="g", num_generations=2, environment=Talk(random.Random(0), 1)
            )
        )


def test_failures_are_bounded_for_each_environment_and_class_apart(monkeypatch):
    monkeypatch.setattr(failures, "REPORTED", 1)
    records: list[Any] = []
    reports, prompt = failures.FailureReports(Tracker("test", None, records.append)), PromptRow(0, {}, "f:1")
    for environment in ("maths", "code"):
        for name in ("lost", "broken"):
            for number in range(2):
                members = [
                    rollout(index=i, failure=name, environment=environment, metadata={"message": message} if i else {})
                    for i, message in enumerate(("", "first", "second"))
                ]
                reports.report(prompt, str(number), members)
    told = [(e["environment"], e["failure"], e["group"], e["rollouts"], e["message"]) for e in events(records)]
    assert told == [(a, b, "0", 3, "first") for a in ("maths", "code") for b in ("lost", "broken")]


def test_many_failures_alike_are_not_all_written_down():
    class Dead(Talk):
        async def seed(self, row):
            raise ConnectionError("refused")

    records: list[Any] = []
    collector = collector_of(records=records)

    async def collect_all():
        for number in range(REPORTED + 9):
            await collector.collect_group(
                PromptRow(number, ROW, f"rows.jsonl:{number + 1}"),
                group_id=f"{number}",
                num_generations=2,
                environment=Dead(random.Random(0), 1),
            )

    asyncio.run(collect_all())
    assert [e["where"] for e in events(records)] == [f"rows.jsonl:{n + 1}" for n in range(REPORTED)]


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
        ({"output": []}, "run_agent_failed"),
        (AgentRun([{**GOOD, "content": "x"}], GradeResult(2.0)), "reward_out_of_range"),
        (AgentRun([{**GOOD, "content": "x"}], 1.0), "verdict_invalid"),
        (AgentRun([{**GOOD, "content": 5}], GradeResult(1.0)), "agent_tokens_broken"),
        (AgentRun(["text"], GradeResult(1.0)), "agent_tokens_broken"),
        (AgentRun([], GradeResult.failed("environment_refused", message="no")), "environment_refused"),
    ],
)
def test_an_agent_that_breaks_fails_its_own_rollout_alone(outcome, failure):
    records: list[Any] = []
    environment = Agent(outcome, stock_chat("qwen3").tokenizer.eos_token_id)
    group = collect(environment, records, num_generations=3)
    assert [r.failure for r in group.rollouts] == [None, failure, None]
    assert [e["failure"] for e in events(records)] == [failure] and events(records)[0]["message"]


def test_a_prompt_needs_room_for_one_token():
    (length,) = {len(collector_of()._chat.render([{"role": "user", "content": "add"}], [TOOL]))}
    for room, failure in ((0, "prompt_too_long"), (1, None)):
        collector = collector_of()
        collector.max_total_length = length + room
        prompt = PromptRow(0, ROW, "row")
        group = asyncio.run(
            collector.collect_group(prompt, group_id="g", num_generations=2, environment=Talk(random.Random(0), 1))
        )
        assert [r.failure for r in group.rollouts] == [failure] * 2
        assert all(len(r.token_ids) <= length + room for r in group.rollouts)


def test_members_keep_their_random_streams_whichever_session_opens_first():
    class SlowFirst(Talk):
        seeded = 0

        async def seed(self, row):
            self.seeded += 1
            await asyncio.sleep(0.05 / self.seeded)
            return await super().seed(row)

    group = collect(SlowFirst(random.Random(0), 1))
    assert [f'"by": {r.index}}}' in r.metadata["turn_texts"][0] for r in group.rollouts] == [True] * 4


@pytest.mark.parametrize("fast", [1, 2])
def test_a_group_that_is_cut_is_used_if_two_of_its_rollouts_have_finished(fast):
    class OthersHang(Talk):
        seeded = hanging = 0

        async def seed(self, row):
            self.seeded += 1
            return Session(tools=[TOOL], state=10 if self.seeded <= fast else -1)

        async def call_tool(self, session, name, arguments):
            if session.state < 0:
                self.hanging += 1
                await asyncio.Event().wait()
            return "done"

    async def cut_soon():
        prompt = PromptRow(0, ROW, "row")
        environment = OthersHang(random.Random(0), 1)
        cut = cut_once(lambda: environment.hanging == 4 - fast)
        return await collector_of().collect_group(
            prompt, group_id="g", num_generations=4, environment=environment, cut=cut
        )

    if fast < 2:
        with pytest.raises(StragglerError):
            asyncio.run(cut_soon())
    else:
        assert [(r.index, r.failure) for r in asyncio.run(cut_soon()).rollouts] == [(0, None), (1, None)]


@pytest.mark.parametrize("reason", FinishReason)
def test_only_a_turn_that_stopped_by_itself_is_whole(reason):
    trajectory = Trajectory([5], [0], [0.0])
    trajectory.append_sampled(Completion("r", 0, [7], [-0.1], reason, [0]))
    assert trajectory.truncated is (reason is not FinishReason.STOP)
