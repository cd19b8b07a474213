"""The versioned buffer of prompt groups between asynchronous generation and training. Pure bookkeeping: it starts no
thread, reads no clock (callers pass `now`) and knows no generator.

Every position of the data order is *issued*, *ready* once its group is graded, then *taken* into exactly one step, or
*discarded*; what fails is *retried*, and at last *dropped*. A group is promised to a *target step* when it is issued,
which waits for it, so that none of its tokens is older than max_age steps (docs/decisions/promised-groups.md).
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import torch

from nemotron_steps.engine.types import Rollout, RolloutGroup, oldest_version
from nemotron_steps.errors import EngineError

STATE_FORMAT = 3

MAX_FAILURES = 3
"""Attempts of a prompt that may fail; a prompt that always does would be tried for ever."""


@dataclass(frozen=True)
class Ticket:
    """One attempt at generating one prompt's group."""

    position: int
    """Place in the data order: 0, 1, 2, ... over all epochs."""
    attempt: int
    """0 the first time, then 1, 2, ..."""
    version: int
    """Generator weights when it was issued."""
    issued_at: float
    """`now` of the caller, seconds on any monotonic clock."""
    target_step: int
    """The step that waits for it; an earlier one may have room for it."""

    @property
    def group_id(self) -> str:
        """Unique to (position, attempt)."""
        return f"{self.position}.{self.attempt}"

    @property
    def saved(self) -> list[int]:
        """As a checkpoint keeps it."""
        return [self.position, self.attempt, self.version, self.target_step]

    @classmethod
    def restored(cls, saved: Sequence[int]) -> Ticket:
        """The inverse of `saved`."""
        position, attempt, version, target_step = saved
        return cls(position, attempt, version, 0.0, target_step)


class GroupBuffer:
    """Prompt positions in flight and graded groups waiting for a step. None stands for no bound."""

    def __init__(
        self,
        num_prompts_per_step: int,
        max_age: int,
        *,
        num_positions: int | None = None,
        num_steps: int | None = None,
    ) -> None:
        self.num_prompts_per_step = num_prompts_per_step
        self.max_age = max_age
        self.num_positions = num_positions
        self.num_steps = num_steps
        self.next_step = 0
        """The step (equal to its weight version) that will take groups next."""
        self._cursor = 0
        self._attempts: dict[int, int] = {}
        self._failures: dict[int, int] = {}
        self.dropped: list[int] = []
        """Positions given up after MAX_FAILURES, in the order that happened."""
        self._retry: list[int] = []
        self._interrupted: list[Ticket] = []
        """In flight when the state was saved; their places are kept."""
        self._in_flight: dict[str, Ticket] = {}
        self._ready: dict[str, tuple[Ticket, RolloutGroup]] = {}
        self._counts: Counter[str] = Counter()
        self._outcomes: list[dict[str, Any]] = []

    # -- generation's side ------------------------------------------------------------------------------------------

    def can_issue(self, generator_version: int) -> bool:
        """Whether a group started now would be young enough for the step it would be promised to."""
        if self._interrupted:
            return True
        if not self._retry and self.num_positions is not None and self._cursor >= self.num_positions:
            return False
        target = self._next_target()
        return target <= generator_version + self.max_age and (self.num_steps is None or target < self.num_steps)

    def issue(self, generator_version: int, now: float) -> Ticket:
        """The next position: an interrupted attempt first, then a retry, else the next of the data order."""
        assert self.can_issue(generator_version)
        if self._interrupted:
            ticket = replace(self._interrupted.pop(0), version=generator_version, issued_at=now)
        else:
            target = self._next_target()
            if self._retry:
                position = self._retry.pop(0)
            else:
                position = self._cursor
                self._cursor += 1
            ticket = Ticket(position, self._attempts.get(position, 0), generator_version, now, target)
            self._counts["issued"] += 1
        self._in_flight[ticket.group_id] = ticket
        return ticket

    def complete(self, group: RolloutGroup) -> None:
        """A graded group comes back."""
        ticket = self._in_flight[group.group_id]
        # The tokens' own versions, not the group's stamp: the age bound is about what was sampled.
        oldest = oldest_version(group.rollouts, ticket.version)
        if oldest < ticket.version:
            raise EngineError(
                f"group {group.group_id} holds tokens older than the weights it was issued on",
                where="GroupBuffer.complete",
                expected=f"versions >= {ticket.version}",
                found=str(oldest),
            )
        del self._in_flight[group.group_id]
        self._ready[group.group_id] = (ticket, group)
        self._counts["completed"] += 1

    def withdraw(self, group_id: str, reason: str) -> None:
        """Give up on an attempt; its position is retried, or dropped at last."""
        ticket = self._remove(group_id)
        position = ticket.position
        self._counts[f"withdrawn_{reason}"] += 1
        failures = self._failures.get(position, 0) + 1
        if failures >= MAX_FAILURES:
            self._end(ticket, "dropped")
            self.dropped.append(position)
            self._counts["dropped"] += 1
            return
        self._failures[position] = failures
        self._attempts[position] = ticket.attempt + 1
        self._retry.append(position)

    def discard(self, group_id: str, reason: str) -> None:
        """Take a group's prompt out of the run: nothing is to be learned from it, and it is not tried again."""
        self._end(self._remove(group_id), reason)
        self._counts[f"discarded_{reason}"] += 1

    # -- training's side --------------------------------------------------------------------------------------------

    def take(self) -> list[RolloutGroup] | None:
        """The groups of the next step, or None while it has to wait for some: first those promised to it, in data
        order, then ready ones of later steps where it has room and all that are left can keep their promises."""
        queue = sorted(self._ready.values(), key=lambda entry: (entry[0].target_step, entry[0].position))
        taken, later = queue[: self.num_prompts_per_step], queue[self.num_prompts_per_step :]
        if len(taken) < self.num_prompts_per_step:
            return None
        waiting = [*(ticket for ticket, _ in later), *self._in_flight.values(), *self._interrupted]
        for place, target in enumerate(sorted(ticket.target_step for ticket in waiting)):
            if target < self.next_step + 1 + place // self.num_prompts_per_step:
                return None
        for ticket, _ in taken:
            del self._ready[ticket.group_id]
            self._end(ticket, "trained")
        self.next_step += 1
        self._counts["taken"] += len(taken)
        return [group for _, group in taken]

    def awaited(self) -> list[Ticket]:
        """Groups in flight that are promised to the next step, longest first; when none is, all that are in flight."""
        promised = [t for t in self._in_flight.values() if t.target_step <= self.next_step]
        return sorted(promised or self._in_flight.values(), key=lambda ticket: (ticket.issued_at, ticket.position))

    def outcomes(self) -> list[dict[str, Any]]:
        """What became of positions since the last call: `position`, `attempt` and `outcome` (`trained`, `dropped`, or
        why it was discarded). They are not issued again."""
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    @property
    def exhausted(self) -> bool:
        """Whether the data order has ended and fewer groups are left than a step needs."""
        if self.num_positions is None:
            return False
        left = self.num_positions - self._cursor + len(self._retry) + self._outstanding
        return left < self.num_prompts_per_step

    @property
    def ready(self) -> int:
        """Groups waiting for a step."""
        return len(self._ready)

    def metrics(self) -> dict[str, float]:
        """Occupancy now, and counts since the start of the run (`async/withdrawn_<reason>` among them)."""
        return {
            "async/in_flight": float(len(self._in_flight)),
            "async/ready": float(len(self._ready)),
            "async/retrying": float(len(self._retry)),
            **{f"async/{name}": float(count) for name, count in sorted(self._counts.items())},
        }

    # -- checkpoint -------------------------------------------------------------------------------------------------

    def state(self) -> tuple[dict[str, Any], list[RolloutGroup]]:
        """Everything a resumed run needs at this moment: JSON-able data, and ready groups, for `encode_groups`. Groups
        in flight are issued again as the same attempts: with the same weights a seeded generator samples the same."""
        ready = sorted(self._ready.values(), key=lambda entry: entry[0].position)
        interrupted = [*self._interrupted, *self._in_flight.values()]
        plain = {
            "format": STATE_FORMAT,
            "num_prompts_per_step": self.num_prompts_per_step,
            "max_age": self.max_age,
            "next_step": self.next_step,
            "cursor": self._cursor,
            "attempts": sorted(self._attempts.items()),
            "failures": sorted(self._failures.items()),
            "dropped": list(self.dropped),
            "retry": list(self._retry),
            "interrupted": [t.saved for t in sorted(interrupted, key=lambda t: (t.target_step, t.position))],
            "ready": [ticket.saved for ticket, _ in ready],
            "counts": dict(self._counts),
        }
        return plain, [group for _, group in ready]

    def load_state_dict(self, state: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        """Go on from a saved `state`, in a fresh buffer, whose settings its promises were made for."""
        settings = [STATE_FORMAT, self.num_prompts_per_step, self.max_age]
        found = [state.get(name) for name in ("format", "num_prompts_per_step", "max_age")]
        if found != settings:
            raise EngineError(
                "the buffer's saved state is of another format or of other settings",
                where="GroupBuffer.load_state_dict",
                expected="format {}, {} prompts a step, max_trajectory_age_steps {}".format(*settings),
                found="format {}, {} prompts a step, max_trajectory_age_steps {}".format(*found),
            )
        self.next_step = state["next_step"]
        self._cursor = state["cursor"]
        self._attempts = dict(state["attempts"])
        self._failures = dict(state["failures"])
        self.dropped = list(state["dropped"])
        self._retry = list(state["retry"])
        self._interrupted = [Ticket.restored(saved) for saved in state["interrupted"]]
        self._counts = Counter(state["counts"])
        for saved, group in zip(state["ready"], decode_groups(tensors), strict=True):
            self._ready[group.group_id] = (Ticket.restored(saved), group)

    @property
    def _outstanding(self) -> int:
        """Groups that have a place in a step."""
        return len(self._interrupted) + len(self._in_flight) + len(self._ready)

    def _next_target(self) -> int:
        """The first step with room, behind all that are promised."""
        return self.next_step + self._outstanding // self.num_prompts_per_step

    def _remove(self, group_id: str) -> Ticket:
        in_flight = self._in_flight.pop(group_id, None)
        return in_flight if in_flight is not None else self._ready.pop(group_id)[0]

    def _end(self, ticket: Ticket, outcome: str) -> None:
        self._attempts.pop(ticket.position, None)
        self._failures.pop(ticket.position, None)
        self._outcomes.append({"position": ticket.position, "attempt": ticket.attempt, "outcome": outcome})


def max_policy_lag(groups: Iterable[RolloutGroup], step: int) -> int:
    """Largest lag of any sampled token of these groups in step `step`; at most max_age by construction."""
    return max((step - oldest_version(group.rollouts, step) for group in groups), default=0)


_DTYPES: dict[str, type[np.generic]] = {
    "token_ids": np.int64,
    "token_mask": np.uint8,
    "logprobs": np.float64,
    "weight_versions": np.int64,
}
"""Column of a rollout → how it is kept. The last has an element for each sampled token, the others for each token."""
_AS_THEY_ARE = ("index", "environment", "truncated", "components", "failure", "metadata")
_RECORDS, _RECORD_BYTES, _EXPERTS = "records", "record_bytes", "routed_experts"


def encode_groups(groups: Sequence[RolloutGroup]) -> dict[str, torch.Tensor]:
    """Groups as flat tensors. Rollout metadata must be JSON-able; a NaN reward is written as null."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    records = [_record(group) for group in groups]
    arrays = {
        name: np.concatenate([np.empty(0, dtype), *(np.array(getattr(r, name), dtype) for r in rollouts)])
        for name, dtype in _DTYPES.items()
    }
    arrays[_RECORDS] = np.frombuffer(bytearray(b"".join(records)), np.uint8)
    arrays[_RECORD_BYTES] = np.array([len(record) for record in records], np.int64)
    experts = [r.routed_experts.ravel() for r in rollouts if r.routed_experts is not None]
    if experts:
        arrays[_EXPERTS] = np.concatenate(experts)
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def _record(group: RolloutGroup) -> bytes:
    """JSON of everything but the token columns."""
    rollouts = [
        {
            **{name: getattr(rollout, name) for name in _AS_THEY_ARE},
            "length": len(rollout.token_ids),
            "sampled": len(rollout.weight_versions),
            "reward": None if math.isnan(rollout.reward) else rollout.reward,
            "turns": [list(turn) for turn in rollout.turns],
            **({} if rollout.routed_experts is None else {_EXPERTS: list(rollout.routed_experts.shape)}),
        }
        for rollout in group.rollouts
    ]
    own = {name: getattr(group, name) for name in ("group_id", "prompt_index", "weight_version")}
    return json.dumps({**own, "rollouts": rollouts}).encode()


def decode_groups(tensors: dict[str, torch.Tensor]) -> list[RolloutGroup]:
    """The inverse of `encode_groups`."""
    texts = tensors[_RECORDS].numpy().tobytes()
    columns = {name: iter(tensors[name].tolist()) for name in _DTYPES}
    experts = tensors[_EXPERTS].numpy() if _EXPERTS in tensors else np.empty(0, np.int16)
    groups: list[RolloutGroup] = []
    byte = 0
    for size in tensors[_RECORD_BYTES].tolist():
        record: dict[str, Any] = json.loads(texts[byte : byte + size])
        byte += size
        rollouts: list[Rollout] = []
        for item in record["rollouts"]:
            lengths = dict.fromkeys(columns, item["length"]) | {"weight_versions": item["sampled"]}
            routed = None
            if _EXPERTS in item:
                count = math.prod(item[_EXPERTS])
                routed = experts[:count].reshape(item[_EXPERTS]).copy()
                experts = experts[count:]
            tokens: dict[str, Any] = {name: list(islice(columns[name], lengths[name])) for name in columns}
            rollouts.append(
                Rollout(
                    group_id=record["group_id"],
                    **{name: item[name] for name in _AS_THEY_ARE},
                    **tokens,
                    reward=math.nan if item["reward"] is None else float(item["reward"]),
                    turns=[(start, stop) for start, stop in item["turns"]],
                    routed_experts=routed,
                )
            )
        groups.append(RolloutGroup(record["group_id"], record["prompt_index"], rollouts, record["weight_version"]))
    return groups
