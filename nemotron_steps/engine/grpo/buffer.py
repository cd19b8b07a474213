"""The versioned buffer of prompt groups between asynchronous generation and training.

It owns the life of every prompt position of the data order: *issued* to the generator, *ready* once its group is
graded, then *taken* into exactly one training step. A group that fails, straggles or grows too old sends its position
to the *retry* queue, MAX_FAILURES times at most: then the prompt is *dropped*. Groups that dynamic sampling finds no
signal in are *discarded*. A position is in exactly one of these places, so that no prompt is lost and none is trained
on twice, through kills and resumes included.

Versions: step v trains on the weights of version v and leaves version v + 1. A group may enter step v only if every
one of its sampled tokens came from version >= v - max_age. The check reads the tokens' own versions at the moment of
taking; a group's stamp is never trusted.

Pure bookkeeping: it starts no thread, reads no clock (callers pass `now`) and knows no generator. Not thread-safe; the
asynchronous loop owns it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from nemotron_steps.engine.grpo.group_codec import decode_groups, encode_groups
from nemotron_steps.engine.grpo.rollout_metrics import oldest_version
from nemotron_steps.engine.types import RolloutGroup
from nemotron_steps.errors import EngineError

STATE_FORMAT = 2

MAX_FAILURES = 3
"""Attempts of a prompt that may straggle, fail or expire; a prompt that always does would be tried for ever."""


@dataclass(frozen=True)
class Ticket:
    """One attempt at generating one prompt's group."""

    position: int
    """Place in the data order: 0, 1, 2, ... over all epochs."""
    attempt: int
    """0 the first time, then 1, 2, ..."""
    group_id: str
    """Explicit id, unique to (position, attempt)."""
    version: int
    """Generator weights when it was issued."""
    issued_at: float
    """`now` of the caller, seconds on any monotonic clock."""


class GroupBuffer:
    """Prompt positions in flight and graded groups waiting for a step.

    Args:
        num_prompts_per_step: groups a step takes.
        max_age: `grpo.async_grpo.max_trajectory_age_steps`.
        straggler_deadline_s: seconds after which a ticket is overdue; None for never.
        num_positions: length of the data order over all epochs; None for endless.
        next_step: the step (equal to its weight version) that will take groups next.
    """

    def __init__(
        self,
        num_prompts_per_step: int,
        max_age: int,
        *,
        straggler_deadline_s: float | None = None,
        num_positions: int | None = None,
        next_step: int = 0,
    ) -> None:
        self.num_prompts_per_step = num_prompts_per_step
        self.max_age = max_age
        self.straggler_deadline_s = straggler_deadline_s
        self.num_positions = num_positions
        self.next_step = next_step
        self._cursor = 0
        self._attempts: dict[int, int] = {}
        self._failures: dict[int, int] = {}
        self.dropped: list[int] = []
        """Positions given up after MAX_FAILURES, in the order that happened."""
        self._retry: list[int] = []
        self._in_flight: dict[str, Ticket] = {}
        self._ready: dict[str, tuple[Ticket, RolloutGroup]] = {}
        self._counts: Counter[str] = Counter()

    # -- generation's side ------------------------------------------------------------------------------------------

    def can_issue(self, generator_version: int) -> bool:
        """Whether a group started now, on weights `generator_version`, would still be young enough when its turn comes.

        With a groups ahead of it, a group is taken by step next_step + floor(a / P), which must not be more than
        `max_age` past the weights it starts on. Issuing beyond that would only generate groups to throw away. Groups
        that are themselves unreachable take no step's place and do not count.
        """
        if not self._retry and self.num_positions is not None and self._cursor >= self.num_positions:
            return False
        ahead = len(self._in_flight) - len(self.unreachable()) + len(self._ready)
        return self.next_step + ahead // self.num_prompts_per_step <= generator_version + self.max_age

    def issue(self, generator_version: int, now: float) -> Ticket:
        """The next position to generate: a retry first, else the next of the data order.

        Raises:
            EngineError: `can_issue` is false.
        """
        if not self.can_issue(generator_version):
            raise EngineError(
                "no group may be issued now",
                where="GroupBuffer.issue",
                expected="can_issue(generator_version)",
                found=f"{len(self._in_flight)} in flight, {len(self._ready)} ready, next step {self.next_step}, "
                f"generator version {generator_version}",
            )
        if self._retry:
            position = self._retry.pop(0)
        else:
            position = self._cursor
            self._cursor += 1
        attempt = self._attempts.get(position, 0)
        ticket = Ticket(position, attempt, f"{position}.{attempt}", generator_version, now)
        self._in_flight[ticket.group_id] = ticket
        self._counts["issued"] += 1
        return ticket

    def complete(self, group: RolloutGroup, *, partial: bool = False) -> None:
        """A graded group comes back; `partial` when a deadline left rollouts out.

        Raises:
            EngineError: its id is not in flight (late, repeated or unknown), or it carries an impossible version.
        """
        ticket = self._in_flight.get(group.group_id)
        if ticket is None:
            raise EngineError(
                f"group {group.group_id} is not in flight",
                where="GroupBuffer.complete",
                expected="an issued group, completed once",
                found="ready" if group.group_id in self._ready else "unknown or withdrawn",
            )
        if oldest_version(group.rollouts, ticket.version) < ticket.version:
            raise EngineError(
                f"group {group.group_id} holds tokens older than the weights it was issued on",
                where="GroupBuffer.complete",
                expected=f"versions >= {ticket.version}",
                found=str(oldest_version(group.rollouts, ticket.version)),
            )
        del self._in_flight[group.group_id]
        self._ready[group.group_id] = (ticket, group)
        self._counts["completed"] += 1
        self._counts["partial"] += int(partial)

    def overdue(self, now: float) -> list[Ticket]:
        """Tickets past the straggler deadline, oldest first. The caller completes them partially or withdraws them."""
        if self.straggler_deadline_s is None:
            return []
        late = [t for t in self._in_flight.values() if now - t.issued_at > self.straggler_deadline_s]
        return sorted(late, key=lambda ticket: (ticket.issued_at, ticket.position))

    def withdraw(self, group_id: str, reason: str) -> None:
        """Give up on an attempt (straggler, lost worker, judge down); its position is retried, or dropped at last.

        Args:
            group_id: in flight or ready.
            reason: snake_case, counted in the metrics.

        Raises:
            EngineError: unknown id.
        """
        self._return(self._remove(group_id, "withdraw"), reason)

    def discard(self, group_id: str, reason: str) -> None:
        """Take a group's prompt out of the run: nothing is to be learned from it, and it is not tried again.

        Args:
            group_id: in flight or ready.
            reason: snake_case, counted in the metrics.

        Raises:
            EngineError: unknown id.
        """
        self._forget(self._remove(group_id, "discard").position)
        self._counts[f"discarded_{reason}"] += 1

    # -- training's side --------------------------------------------------------------------------------------------

    def take(self, step: int) -> list[RolloutGroup] | None:
        """The groups of step `step`, or None while too few are young enough.

        Too old groups are withdrawn and counted (`expired`). The oldest versions go first, so that they are used
        before they expire; among equals, data order decides.

        Raises:
            EngineError: steps are not taken in order.
        """
        if step != self.next_step:
            raise EngineError(
                "steps must be taken in order",
                where="GroupBuffer.take",
                expected=str(self.next_step),
                found=str(step),
            )
        self.expire()
        if len(self._ready) < self.num_prompts_per_step:
            return None
        queue = sorted(self._ready.values(), key=lambda entry: (_oldest(entry), entry[0].position))
        taken = queue[: self.num_prompts_per_step]
        for ticket, _ in taken:
            del self._ready[ticket.group_id]
            self._forget(ticket.position)
        self.next_step = step + 1
        self._counts["taken"] += len(taken)
        return [group for _, group in taken]

    def expire(self) -> list[Ticket]:
        """Withdraw ready groups with a token older than the next step may train on; returns their tickets.

        It counts as a failure: groups are issued only as far ahead as their turn comes in time, so one that expires
        took too long.
        """
        oldest_allowed = self.next_step - self.max_age
        old = [entry for entry in self._ready.values() if _oldest(entry) < oldest_allowed]
        for ticket, _ in old:
            del self._ready[ticket.group_id]
            self._return(ticket, "expired")
        return [ticket for ticket, _ in old]

    def unreachable(self) -> list[Ticket]:
        """Tickets in flight that can no longer make the next step: started on weights already too old.

        Continuing them wastes generation; the caller should cancel and withdraw them.
        """
        oldest_allowed = self.next_step - self.max_age
        return [ticket for ticket in self._in_flight.values() if ticket.version < oldest_allowed]

    @property
    def exhausted(self) -> bool:
        """Whether the data order has ended and fewer groups are left than a step needs."""
        if self.num_positions is None:
            return False
        left = self.num_positions - self._cursor + len(self._retry) + len(self._in_flight) + len(self._ready)
        return left < self.num_prompts_per_step

    @property
    def in_flight(self) -> int:
        """Groups being generated or judged."""
        return len(self._in_flight)

    @property
    def ready(self) -> int:
        """Groups waiting for a step."""
        return len(self._ready)

    def outstanding(self) -> set[int]:
        """Positions issued at least once and not yet taken. Every other one below the cursor was trained on, unless it
        is among `dropped` or was discarded."""
        positions = {ticket.position for ticket in self._in_flight.values()}
        positions |= {ticket.position for ticket, _ in self._ready.values()}
        return positions | set(self._retry)

    def metrics(self) -> dict[str, float]:
        """Occupancy now, and counts since the start of the run (`async/withdrawn_<reason>` among them)."""
        return {
            "async/in_flight": float(len(self._in_flight)),
            "async/ready": float(len(self._ready)),
            "async/retrying": float(len(self._retry)),
            **{f"async/{name}": float(count) for name, count in sorted(self._counts.items())},
        }

    # -- checkpoint -------------------------------------------------------------------------------------------------

    def state_dict(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Everything a resumed run needs, as JSON-able data and tensors (safetensors).

        Groups in flight are saved as retries: their partial generations die with the process. The retry is the same
        attempt, so with the same weights a seeded generator samples the same group again.
        """
        ready = sorted(self._ready.values(), key=lambda entry: entry[0].position)
        groups, tensors = encode_groups([group for _, group in ready])
        attempts = dict(self._attempts)
        retry = list(self._retry)
        for ticket in sorted(self._in_flight.values(), key=lambda t: t.position):
            retry.append(ticket.position)
            attempts[ticket.position] = ticket.attempt
        state = {
            "format": STATE_FORMAT,
            "num_prompts_per_step": self.num_prompts_per_step,
            "max_age": self.max_age,
            "next_step": self.next_step,
            "cursor": self._cursor,
            "attempts": sorted(attempts.items()),
            "failures": sorted(self._failures.items()),
            "dropped": self.dropped,
            "retry": retry,
            "ready": [[t.position, t.attempt, t.version] for t, _ in ready],
            "groups": groups,
            "counts": dict(self._counts),
        }
        return state, tensors

    def load_state_dict(self, state: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        """The inverse of `state_dict`, into a fresh buffer. The age bound applies to restored groups like any others.

        Raises:
            EngineError: the buffer is in use, or the state has another format.
        """
        if self._cursor or self._in_flight or self._ready:
            raise EngineError("state is loaded into a buffer that is in use", where="GroupBuffer.load_state_dict")
        if state.get("format") != STATE_FORMAT:
            raise EngineError(
                "the buffer's saved state has another format",
                where="GroupBuffer.load_state_dict",
                expected=str(STATE_FORMAT),
                found=str(state.get("format")),
            )
        self.next_step = int(state["next_step"])
        self._cursor = int(state["cursor"])
        self._attempts = {int(position): int(attempt) for position, attempt in state["attempts"]}
        self._failures = {int(position): int(count) for position, count in state["failures"]}
        self.dropped = [int(position) for position in state["dropped"]]
        self._retry = [int(position) for position in state["retry"]]
        self._counts = Counter({str(name): int(count) for name, count in state["counts"].items()})
        groups = decode_groups(state["groups"], tensors)
        for (position, attempt, version), group in zip(state["ready"], groups, strict=True):
            ticket = Ticket(int(position), int(attempt), group.group_id, int(version), 0.0)
            self._ready[group.group_id] = (ticket, group)

    def _remove(self, group_id: str, caller: str) -> Ticket:
        ticket = self._in_flight.pop(group_id, None)
        if ticket is None and group_id in self._ready:
            ticket = self._ready.pop(group_id)[0]
        if ticket is None:
            raise EngineError(f"group {group_id} is neither in flight nor ready", where=f"GroupBuffer.{caller}")
        return ticket

    def _return(self, ticket: Ticket, reason: str) -> None:
        position = ticket.position
        self._counts[f"withdrawn_{reason}"] += 1
        failures = self._failures.get(position, 0) + 1
        if failures >= MAX_FAILURES:
            self._forget(position)
            self.dropped.append(position)
            self._counts["dropped"] += 1
            return
        self._failures[position] = failures
        self._attempts[position] = ticket.attempt + 1
        self._retry.append(position)

    def _forget(self, position: int) -> None:
        self._attempts.pop(position, None)
        self._failures.pop(position, None)


def _oldest(entry: tuple[Ticket, RolloutGroup]) -> int:
    """Oldest version of any sampled token; the ticket's when nothing was sampled."""
    ticket, group = entry
    return oldest_version(group.rollouts, ticket.version)


def max_policy_lag(groups: Iterable[RolloutGroup], step: int) -> int:
    """Largest lag of any sampled token of these groups in step `step`; at most max_age by construction."""
    return max((step - oldest_version(group.rollouts, step) for group in groups), default=0)
