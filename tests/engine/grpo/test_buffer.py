"""None"""

import json

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from nemotron_steps.engine.grpo.buffer import (
    MAX_FAILURES,
    GroupBuffer,
    Ticket,
    decode_groups,
    encode_groups,
    max_policy_lag,
)
from nemotron_steps.engine.types import RolloutGroup
from nemotron_steps.errors import EngineError
from tests.engine.engine_samples import rollout


def graded(ticket: Ticket, *, versions: list[int] | None = None, members: int = 2) -> RolloutGroup:
    """A group as it comes back for a ticket; `versions` of its four response tokens."""
    versions = versions or [ticket.version] * 4
    rollouts = [
        rollout(ticket.group_id, i, reward=float(i), weight_versions=list(versions), metadata={"turn_texts": ["é"]})
        for i in range(members)
    ]
    return RolloutGroup(ticket.group_id, ticket.position, rollouts, min(versions))


def encoded(buffer: GroupBuffer) -> tuple[dict, dict]:
    """The buffer's state as it is read back from disk."""
    plain, ready = buffer.state()
    return json.loads(json.dumps(plain, allow_nan=False)), encode_groups(ready)


def resumed(buffer: GroupBuffer) -> GroupBuffer:
    """The buffer of a process that goes on after a kill."""
    back = GroupBuffer(
        buffer.num_prompts_per_step,
        buffer.max_age,
        num_positions=buffer.num_positions,
        num_steps=buffer.num_steps,
    )
    back.load_state_dict(*encoded(buffer))
    return back


def outstanding(buffer: GroupBuffer) -> set[int]:
    """Positions issued at least once whose end is not known yet."""
    state, _ = buffer.state()
    return {saved[0] for saved in [*state["interrupted"], *state["ready"]]} | set(state["retry"])


def test_a_group_that_failed_is_counted_and_retried_first() -> None:
    buffer = GroupBuffer(2, 1)
    failed, quick = buffer.issue(0, now=0.0), buffer.issue(0, now=5.0)
    buffer.withdraw(failed.group_id, "ungraded")
    assert buffer.metrics()["async/withdrawn_ungraded"] == 1.0
    retry = buffer.issue(0, now=11.0)
    assert (retry.position, retry.attempt) == (failed.position, 1)
    with pytest.raises(KeyError):
        buffer.complete(graded(failed))  # the late original must not come back
    buffer.complete(graded(quick))
    buffer.complete(graded(retry))
    assert buffer.take() is not None


def test_tokens_older_than_the_weights_of_their_ticket_are_refused() -> None:
    buffer = GroupBuffer(1, 1)
    late = graded(buffer.issue(0, 0.0), versions=[-1, 0, 0, 0])
    late.weight_version = 0  # a stamp that lies: the bound is on every token
    with pytest.raises(EngineError, match="older than the weights"):
        buffer.complete(late)


class AsyncRun(RuleBasedStateMachine):
    """Random interleavings of generation, failures, stragglers, training and kill-and-resume."""

    prompts, max_age = 3, 2

    def __init__(self) -> None:
        super().__init__()
        self.buffer = GroupBuffer(self.prompts, self.max_age)
        self.version = 0
        self.flying: dict[str, Ticket] = {}
        self.trained: list[int] = []
        self.discarded: list[int] = []
        self.failures: dict[int, int] = {}
        self.now = 0.0

    @precondition(lambda self: self.buffer.can_issue(self.version))
    @rule()
    def issue(self) -> None:
        ticket = self.buffer.issue(self.version, self.now)
        assert self.failures.get(ticket.position, 0) <= ticket.attempt < MAX_FAILURES
        self.flying[ticket.group_id] = ticket

    @precondition(lambda self: self.flying)
    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        ticket = self.flying.pop(data.draw(st.sampled_from(sorted(self.flying))))
        # In-flight updates: later tokens may come from newer weights than the ticket's.
        last = data.draw(st.integers(ticket.version, max(ticket.version, self.version)))
        self.buffer.complete(graded(ticket, versions=[ticket.version, ticket.version, last, last]))

    @precondition(lambda self: self.flying)
    @rule(data=st.data())
    def straggle(self, data: st.DataObject) -> None:
        ticket = self.flying.pop(data.draw(st.sampled_from(sorted(self.flying))))
        self.buffer.withdraw(ticket.group_id, "straggler")
        self.failures[ticket.position] = self.failures.get(ticket.position, 0) + 1

    @precondition(lambda self: self.flying)
    @rule(data=st.data())
    def complete_without_signal(self, data: st.DataObject) -> None:
        ticket = self.flying.pop(data.draw(st.sampled_from(sorted(self.flying))))
        self.buffer.complete(graded(ticket))
        self.buffer.discard(ticket.group_id, "no_signal")
        self.discarded.append(ticket.position)

    @rule()
    def train(self) -> None:
        step = self.buffer.next_step
        groups = self.buffer.take()
        if groups is None:
            return
        assert len(groups) == self.prompts
        assert max_policy_lag(groups, step) <= self.max_age
        assert all(ticket.target_step > step for ticket in self.flying.values())
        self.trained += [group.prompt_index for group in groups]

    @rule()
    def refit(self) -> None:
        self.version = self.buffer.next_step

    @rule()
    def kill_and_resume(self) -> None:
        self.buffer = resumed(self.buffer)
        self.flying.clear()
        self.version = self.buffer.next_step

    @invariant()
    def no_prompt_is_lost_or_repeated(self) -> None:
        assert len(set(self.trained)) == len(self.trained)
        places = [*outstanding(self.buffer), *self.trained, *self.buffer.dropped, *self.discarded]
        assert sorted(places) == list(range(len(places)))

    @invariant()
    def a_prompt_is_dropped_only_after_it_failed_often_enough(self) -> None:
        often = {position for position, count in self.failures.items() if count >= MAX_FAILURES}
        assert often <= set(self.buffer.dropped)
        counts = self.buffer.metrics()
        withdrawn = sum(n for name, n in counts.items() if name.startswith("async/withdrawn_"))
        assert withdrawn == counts.get("async/withdrawn_straggler", 0) >= MAX_FAILURES * len(self.buffer.dropped)

    @invariant()
    def generation_can_always_go_on(self) -> None:
        """Nothing flies: the next step has what it waits for, or more may be issued on fresh weights."""
        if not self.flying and not self.buffer.can_issue(self.buffer.next_step):
            assert resumed(self.buffer).take() is not None


TestAsyncRun = AsyncRun.TestCase
TestAsyncRun.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


def groups() -> list[RolloutGroup]:
    """Two groups that differ from each other and from what a rollout has by default."""
    first = [
        rollout(
            "a",
            3,
            reward=0.1 + 0.2,
            truncated=True,
            environment="code",
            components={"right": 1.0, "format": 0.25},
            weight_versions=[4, 4, 5, 5],
            turns=[(2, 3), (4, 6)],
            metadata={"turn_texts": ["x", "y"], "teacher": "b", "low_effort": {"reward": 0.1, "length_reward": 2.0}},
        ),
        rollout("a", 1, response=2, reward=-1.5, failure="judge_unavailable", weight_versions=[]),
    ]
    return [RolloutGroup("a", 7, first, 4), RolloutGroup("b", 2, [rollout("b", 0, response=9, version=6)], 6)]


def test_every_field_of_every_rollout_comes_back() -> None:
    assert decode_groups(encode_groups(groups())) == groups()
    assert decode_groups(encode_groups([])) == []
