from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from safetensors.torch import load_file, save_file

from nemotron_steps.engine.grpo.buffer import MAX_FAILURES, GroupBuffer, Ticket, max_policy_lag
from nemotron_steps.engine.grpo.group_codec import decode_groups, encode_groups
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


def filled(buffer: GroupBuffer, count: int, version: int) -> list[Ticket]:
    tickets = [buffer.issue(version, now=0.0) for _ in range(count)]
    for ticket in tickets:
        buffer.complete(graded(ticket))
    return tickets


def test_groups_wait_until_a_step_is_full_and_go_in_data_order() -> None:
    buffer = GroupBuffer(3, 1)
    tickets = [buffer.issue(0, 0.0) for _ in range(3)]
    for ticket in reversed(tickets[1:]):
        buffer.complete(graded(ticket))
    assert buffer.take(0) is None
    buffer.complete(graded(tickets[0]))
    taken = buffer.take(0)
    assert taken is not None and [g.prompt_index for g in taken] == [0, 1, 2]
    assert buffer.outstanding() == set()


def test_generation_runs_ahead_exactly_as_far_as_the_age_bound_allows() -> None:
    buffer = GroupBuffer(4, 1)
    issued = 0
    while buffer.can_issue(0):
        buffer.issue(0, 0.0)
        issued += 1
    assert issued == 8  # steps 0 and 1 may train on version 0
    with pytest.raises(EngineError, match="no group may be issued"):
        buffer.issue(0, 0.0)
    buffer = GroupBuffer(4, 2)
    while buffer.can_issue(0):
        buffer.issue(0, 0.0)
    assert buffer.in_flight == 12


def test_the_bound_is_on_every_token_not_on_the_groups_stamp() -> None:
    buffer = GroupBuffer(1, 1)
    ticket = buffer.issue(0, 0.0)
    late = graded(ticket, versions=[0, 1, 2, 2])
    late.weight_version = 2  # a stamp that lies
    buffer.next_step = 2
    buffer.complete(late)
    assert buffer.take(2) is None  # version 0 is two behind
    assert buffer.metrics()["async/withdrawn_expired"] == 1.0
    again = buffer.issue(2, 0.0)
    assert (again.position, again.attempt, again.group_id) == (0, 1, "0.1")


def test_oldest_versions_go_first_before_they_expire() -> None:
    buffer = GroupBuffer(1, 1)
    first = buffer.issue(0, 0.0)
    second = buffer.issue(0, 0.0)
    buffer.complete(graded(first, versions=[1, 1, 1, 1]))
    buffer.complete(graded(second, versions=[0, 1, 1, 1]))
    taken = buffer.take(0)
    assert taken is not None and taken[0].group_id == second.group_id


def test_stragglers_are_found_withdrawn_counted_and_retried_first() -> None:
    buffer = GroupBuffer(2, 1, straggler_deadline_s=10.0)
    slow = buffer.issue(0, now=0.0)
    quick = buffer.issue(0, now=5.0)
    assert buffer.overdue(10.0) == []
    assert buffer.overdue(10.5) == [slow]
    buffer.withdraw(slow.group_id, "straggler")
    assert buffer.metrics()["async/withdrawn_straggler"] == 1.0
    retry = buffer.issue(0, now=11.0)
    assert (retry.position, retry.attempt) == (slow.position, 1)
    with pytest.raises(EngineError, match="not in flight"):
        buffer.complete(graded(slow))  # the late original must not come back
    buffer.complete(graded(quick), partial=True)
    buffer.complete(graded(retry))
    assert buffer.metrics()["async/partial"] == 1.0
    assert buffer.take(0) is not None


def test_a_prompt_that_always_fails_is_dropped_and_a_kill_is_not_its_fault() -> None:
    buffer = GroupBuffer(1, 1)
    for failure in range(MAX_FAILURES):
        state, tensors = buffer.state_dict()
        buffer = GroupBuffer(1, 1)  # a kill between attempts neither counts nor forgives
        buffer.load_state_dict(json.loads(json.dumps(state)), tensors)
        ticket = buffer.issue(0, 0.0)
        assert (ticket.position, ticket.attempt) == (0, failure)
        buffer.withdraw(ticket.group_id, "straggler")
    assert buffer.dropped == [0] and buffer.outstanding() == set()
    assert buffer.metrics()["async/dropped"] == 1.0
    assert buffer.metrics()["async/withdrawn_straggler"] == float(MAX_FAILURES)
    assert buffer.issue(0, 0.0).position == 1
    for _ in range(2 * MAX_FAILURES):
        state, tensors = buffer.state_dict()
        buffer = GroupBuffer(1, 1)
        buffer.load_state_dict(state, tensors)
        assert buffer.dropped == [0]
        assert buffer.issue(0, 0.0).group_id == "1.0"


def test_groups_without_a_signal_leave_and_their_prompts_do_not_come_back() -> None:
    buffer = GroupBuffer(1, 1, num_positions=2)
    first, second = filled(buffer, 2, 0)
    buffer.discard(first.group_id, "no_signal")
    assert buffer.outstanding() == {second.position} and buffer.dropped == []
    assert buffer.metrics()["async/discarded_no_signal"] == 1.0
    with pytest.raises(EngineError, match="neither"):
        buffer.discard(first.group_id, "no_signal")
    assert buffer.take(0) is not None and buffer.exhausted


def test_groups_started_on_weights_too_old_are_named_and_block_nobody() -> None:
    buffer = GroupBuffer(1, 1)
    stuck = [buffer.issue(0, 0.0), buffer.issue(0, 0.0)]
    assert not buffer.can_issue(0)
    buffer.next_step = 2
    assert buffer.unreachable() == stuck
    assert buffer.can_issue(2)


def test_misuse_is_refused() -> None:
    buffer = GroupBuffer(1, 1)
    ticket = buffer.issue(0, 0.0)
    buffer.complete(graded(ticket))
    with pytest.raises(EngineError, match="not in flight"):
        buffer.complete(graded(ticket))
    with pytest.raises(EngineError, match="in order"):
        buffer.take(1)
    with pytest.raises(EngineError, match="neither"):
        buffer.withdraw("9.0", "x")
    other = buffer.issue(0, 0.0)
    with pytest.raises(EngineError, match="older than the weights"):
        buffer.complete(graded(replace(other, version=0), versions=[-1, 0, 0, 0]))
    with pytest.raises(EngineError, match="in use"):
        buffer.load_state_dict({}, {})


def test_the_end_of_the_data() -> None:
    buffer = GroupBuffer(2, 1, num_positions=3)
    assert not buffer.exhausted
    filled(buffer, 3, 0)
    assert not buffer.can_issue(0)
    assert buffer.take(0) is not None
    assert buffer.exhausted and buffer.ready == 1


def test_state_survives_json_and_safetensors_bit_by_bit(tmp_path: Path) -> None:
    buffer = GroupBuffer(4, 1)
    done = filled(buffer, 2, 0)
    failed = buffer.issue(0, 0.0)
    broken = graded(failed)
    broken.rollouts[0] = replace(broken.rollouts[0], reward=math.nan, failure="judge_failed", logprobs=[0.1 + 0.2] * 6)
    buffer.complete(broken)
    flying = buffer.issue(0, 0.0)
    state, tensors = buffer.state_dict()
    save_file(tensors, tmp_path / "groups.safetensors")
    (tmp_path / "state.json").write_text(json.dumps(state, allow_nan=False))

    back = GroupBuffer(4, 1)
    back.load_state_dict(json.loads((tmp_path / "state.json").read_text()), load_file(tmp_path / "groups.safetensors"))
    assert back.outstanding() == buffer.outstanding() == {0, 1, 2, 3}
    retry = back.issue(0, 0.0)
    # The same attempt under the same id: a seeded generator samples again what died with the process.
    assert retry.group_id == flying.group_id
    back.complete(graded(retry))
    taken = back.take(0)
    assert taken is not None and [g.group_id for g in taken] == [*(t.group_id for t in [*done, failed, flying])]
    assert taken[0] == graded(done[0])
    assert taken[2].rollouts[0].logprobs == [0.1 + 0.2] * 6 and math.isnan(taken[2].rollouts[0].reward)


def test_a_resumed_buffer_still_refuses_groups_that_are_too_old() -> None:
    buffer = GroupBuffer(1, 1)
    filled(buffer, 2, 0)
    assert buffer.take(0) is not None
    assert buffer.take(1) is not None
    buffer = GroupBuffer(1, 1)
    filled(buffer, 1, 0)
    state, tensors = buffer.state_dict()
    state["next_step"] = 2  # two updates have happened since
    back = GroupBuffer(1, 1)
    back.load_state_dict(state, tensors)
    assert back.take(2) is None and back.outstanding() == {0}


def test_saved_groups_that_do_not_match_their_tensors_are_refused() -> None:
    records, tensors = encode_groups([graded(Ticket(0, 0, "0.0", 0, 0.0))])
    tensors["token_ids"] = tensors["token_ids"].repeat(2)
    with pytest.raises(EngineError, match="do not belong together"):
        decode_groups(records, tensors)


class AsyncRun(RuleBasedStateMachine):
    """Random interleavings of generation, failures, stragglers, training and kill-and-resume."""

    prompts, max_age = 3, 1

    def __init__(self) -> None:
        super().__init__()
        self.buffer = GroupBuffer(self.prompts, self.max_age, straggler_deadline_s=5.0)
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
        groups = self.buffer.take(step)
        if groups is None:
            return
        assert len(groups) == self.prompts
        assert max_policy_lag(groups, step) <= self.max_age
        self.trained += [group.prompt_index for group in groups]

    @rule()
    def refit(self) -> None:
        self.version = self.buffer.next_step

    @rule()
    def kill_and_resume(self) -> None:
        state, tensors = self.buffer.state_dict()
        self.buffer = GroupBuffer(self.prompts, self.max_age, straggler_deadline_s=5.0)
        self.buffer.load_state_dict(json.loads(json.dumps(state)), tensors)
        self.flying.clear()
        self.version = self.buffer.next_step

    @invariant()
    def no_prompt_is_lost_or_repeated(self) -> None:
        assert len(set(self.trained)) == len(self.trained)
        places = [*self.buffer.outstanding(), *self.trained, *self.buffer.dropped, *self.discarded]
        assert sorted(places) == list(range(len(places)))

    @invariant()
    def a_prompt_is_dropped_only_after_it_failed_often_enough(self) -> None:
        often = {position for position, count in self.failures.items() if count >= MAX_FAILURES}
        assert often <= set(self.buffer.dropped)
        withdrawn = sum(n for name, n in self.buffer.metrics().items() if name.startswith("async/withdrawn_"))
        assert withdrawn >= MAX_FAILURES * len(self.buffer.dropped)

    @invariant()
    def generation_can_always_go_on(self) -> None:
        """Never a state in which nothing flies, too little is ready, and nothing may be issued on fresh weights."""
        if not self.flying and self.buffer.ready < self.prompts:
            assert self.buffer.can_issue(self.buffer.next_step)


TestAsyncRun = AsyncRun.TestCase
TestAsyncRun.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
