"""The versioned buffer of prompt groups between asynchronous generation and training.

It owns the life of every prompt position of the data order: *issued* to the generator, *ready* once its group is
graded, then *taken* into exactly one training step. A group that fails or straggles sends its position to the *retry*
queue, MAX_FAILURES times at most: then the prompt is *dropped*. Groups that dynamic sampling finds no signal in are
*discarded*. A position is in exactly one of these places, so that no prompt is lost and none is trained on twice,
through kills and resumes included.

Versions: step v trains on the weights of version v and leaves version v + 1. A group may enter step v only if every
one of its sampled tokens came from version >= v - max_age.

Promises: when it is issued, a group is promised to the first step with room for it, its *target step*, and nothing is
issued whose target is more than max_age past the weights it starts on. A step waits for every group promised to it,
however long that takes (straggler_deadline_s bounds it where one is set), so a group is never too old when its turn
comes, and long answers are trained on as often as short ones. Room that a step gains (a group without a signal, an
attempt that failed) goes to groups of later steps that are ready, as long as all that are left keep their promises.
docs/decisions/promised-groups.md has the reasons.

Pure bookkeeping: it starts no thread, reads no clock (callers pass `now`) and knows no generator. Not thread-safe; the
asynchronous loop owns it.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from nemotron_steps.engine.grpo.rollout_metrics import oldest_version
from nemotron_steps.engine.types import Rollout, RolloutGroup
from nemotron_steps.errors import EngineError

STATE_FORMAT = 3

MAX_FAILURES = 3
"""Attempts of a prompt that may straggle or fail; a prompt that always does would be tried for ever."""


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
    target_step: int
    """The step that waits for it; an earlier one may have room for it."""


@dataclass(frozen=True)
class Outcome:
    """What became of a prompt position: it is not issued again."""

    position: int
    attempt: int
    """Of its last attempt."""
    outcome: str
    """`trained`, `dropped`, or why it was discarded."""


@dataclass(frozen=True)
class BufferState:
    """A buffer at one moment. Encoding it takes time and may happen in another thread, while the buffer goes on."""

    plain: dict[str, Any]
    """JSON-able: everything but the groups."""
    ready: list[RolloutGroup]

    def encode(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """What `GroupBuffer.load_state_dict` takes: JSON-able data and tensors (safetensors)."""
        return self.plain, encode_groups(self.ready)


class GroupBuffer:
    """Prompt positions in flight and graded groups waiting for a step."""

    def __init__(
        self,
        num_prompts_per_step: int,
        max_age: int,
        *,
        straggler_deadline_s: float | None = None,
        num_positions: int | None = None,
        num_steps: int | None = None,
    ) -> None:
        self.num_prompts_per_step = num_prompts_per_step
        self.max_age = max_age
        self.straggler_deadline_s = straggler_deadline_s
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
        self._outcomes: list[Outcome] = []

    # -- generation's side ------------------------------------------------------------------------------------------

    def can_issue(self, generator_version: int) -> bool:
        """Whether a group started now, on weights `generator_version`, would be young enough for the step it would be
        promised to."""
        if self._interrupted:
            return True
        if not self._retry and self.num_positions is not None and self._cursor >= self.num_positions:
            return False
        target = self._next_target()
        return target <= generator_version + self.max_age and (self.num_steps is None or target < self.num_steps)

    def issue(self, generator_version: int, now: float) -> Ticket:
        """The next position to generate: an interrupted attempt first, then a retry, else the next of the data
        order."""
        if not self.can_issue(generator_version):
            found = f"{self.metrics()}, next step {self.next_step}, generator version {generator_version}"
            raise EngineError("no group may be issued now", where="GroupBuffer.issue", found=found)
        if self._interrupted:
            ticket = replace(self._interrupted.pop(0), version=generator_version, issued_at=now)
        else:
            target = self._next_target()
            if self._retry:
                position = self._retry.pop(0)
            else:
                position = self._cursor
                self._cursor += 1
            attempt = self._attempts.get(position, 0)
            ticket = Ticket(position, attempt, f"{position}.{attempt}", generator_version, now, target)
            self._counts["issued"] += 1
        self._in_flight[ticket.group_id] = ticket
        return ticket

    def complete(self, group: RolloutGroup, *, partial: bool = False) -> None:
        """A graded group comes back; `partial` when a deadline left rollouts out."""
        ticket = self._in_flight.get(group.group_id)
        if ticket is None:
            found = "ready" if group.group_id in self._ready else "unknown or withdrawn"
            raise EngineError(f"group {group.group_id} is not in flight", where="GroupBuffer.complete", found=found)
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
        self._counts["partial"] += int(partial)

    def overdue(self, now: float) -> list[Ticket]:
        """Tickets past the straggler deadline, oldest first. The caller completes them partially or withdraws them."""
        if self.straggler_deadline_s is None:
            return []
        late = [t for t in self._in_flight.values() if now - t.issued_at > self.straggler_deadline_s]
        return sorted(late, key=lambda ticket: (ticket.issued_at, ticket.position))

    def withdraw(self, group_id: str, reason: str) -> None:
        """Give up on an attempt (straggler, judge down); its position is retried, or dropped at last."""
        ticket = self._remove(group_id, "withdraw")
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
        self._end(self._remove(group_id, "discard"), reason)
        self._counts[f"discarded_{reason}"] += 1

    # -- training's side --------------------------------------------------------------------------------------------

    def take(self, step: int) -> list[RolloutGroup] | None:
        """The groups of step `step`, or None while it has to wait for some."""
        if step != self.next_step:
            expected, found = str(self.next_step), str(step)
            raise EngineError("steps must be taken in order", where="GroupBuffer.take", expected=expected, found=found)
        queue = sorted(self._ready.values(), key=lambda entry: (entry[0].target_step, entry[0].position))
        taken, later = queue[: self.num_prompts_per_step], queue[self.num_prompts_per_step :]
        if len(taken) < self.num_prompts_per_step or not self._keeps_promises([ticket for ticket, _ in later]):
            return None
        for ticket, _ in taken:
            del self._ready[ticket.group_id]
            self._end(ticket, "trained")
        self.next_step = step + 1
        self._counts["taken"] += len(taken)
        return [group for _, group in taken]

    def _keeps_promises(self, later: Iterable[Ticket]) -> bool:
        """Whether all that would be left after the next step can still be trained by their target steps."""
        left = sorted(t.target_step for t in [*later, *self._in_flight.values(), *self._interrupted])
        first = self.next_step + 1
        return all(target >= first + place // self.num_prompts_per_step for place, target in enumerate(left))

    def awaited(self) -> list[Ticket]:
        """Groups in flight that are promised to the next step, longest first; when none is, all that are in flight."""
        promised = [t for t in self._in_flight.values() if t.target_step <= self.next_step]
        return sorted(promised or self._in_flight.values(), key=lambda ticket: (ticket.issued_at, ticket.position))

    def outcomes(self) -> list[Outcome]:
        """What became of positions since the last call."""
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

    def state(self) -> BufferState:
        """Everything a resumed run needs."""
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
            "interrupted": [
                _saved(ticket) for ticket in sorted(interrupted, key=lambda t: (t.target_step, t.position))
            ],
            "ready": [_saved(ticket) for ticket, _ in ready],
            "counts": dict(self._counts),
        }
        return BufferState(plain, [group for _, group in ready])

    def load_state_dict(self, state: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        """Go on from an encoded `state`, in a fresh buffer."""
        where = "GroupBuffer.load_state_dict"
        if self._cursor or self._outstanding:
            raise EngineError("state is loaded into a buffer that is in use", where=where)
        # Promises were made for these settings.
        settings = [STATE_FORMAT, self.num_prompts_per_step, self.max_age]
        found = [state.get(name) for name in ("format", "num_prompts_per_step", "max_age")]
        if found != settings:
            raise EngineError(
                "the buffer's saved state is of another format or of other settings",
                where=where,
                expected="format {}, {} prompts a step, max_trajectory_age_steps {}".format(*settings),
                found="format {}, {} prompts a step, max_trajectory_age_steps {}".format(*found),
            )
        self.next_step = int(state["next_step"])
        self._cursor = int(state["cursor"])
        self._attempts = {int(position): int(attempt) for position, attempt in state["attempts"]}
        self._failures = {int(position): int(count) for position, count in state["failures"]}
        self.dropped = [int(position) for position in state["dropped"]]
        self._retry = [int(position) for position in state["retry"]]
        self._interrupted = [_restored(saved) for saved in state["interrupted"]]
        self._counts = Counter({str(name): int(count) for name, count in state["counts"].items()})
        groups = decode_groups(tensors)
        for saved, group in zip(state["ready"], groups, strict=True):
            self._ready[group.group_id] = (_restored(saved), group)

    @property
    def _outstanding(self) -> int:
        """Groups that have a place in a step."""
        return len(self._interrupted) + len(self._in_flight) + len(self._ready)

    def _next_target(self) -> int:
        """The first step with room, behind all that are promised."""
        return self.next_step + self._outstanding // self.num_prompts_per_step

    def _remove(self, group_id: str, caller: str) -> Ticket:
        ticket = self._in_flight.pop(group_id, None)
        if ticket is None and group_id in self._ready:
            ticket = self._ready.pop(group_id)[0]
        if ticket is None:
            raise EngineError(f"group {group_id} is neither in flight nor ready", where=f"GroupBuffer.{caller}")
        return ticket

    def _end(self, ticket: Ticket, outcome: str) -> None:
        self._attempts.pop(ticket.position, None)
        self._failures.pop(ticket.position, None)
        self._outcomes.append(Outcome(ticket.position, ticket.attempt, outcome))


def _saved(ticket: Ticket) -> list[int]:
    return [ticket.position, ticket.attempt, ticket.version, ticket.target_step]


def _restored(saved: Iterable[int]) -> Ticket:
    position, attempt, version, target_step = map(int, saved)
    return Ticket(position, attempt, f"{position}.{attempt}", version, 0.0, target_step)


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
    """Groups as flat tensors."""
    columns: dict[str, list[np.ndarray]] = {name: [np.empty(0, dtype)] for name, dtype in _DTYPES.items()}
    records = [_record(group) for group in groups]
    experts: list[np.ndarray] = []
    for group in groups:
        for rollout in group.rollouts:
            for name, dtype in _DTYPES.items():
                columns[name].append(np.array(getattr(rollout, name), dtype))
            if rollout.routed_experts is not None:
                experts.append(rollout.routed_experts.ravel())
    arrays = {
        **{name: np.concatenate(parts) for name, parts in columns.items()},
        _RECORDS: np.frombuffer(bytearray(b"".join(records)), np.uint8),
        _RECORD_BYTES: np.array([len(record) for record in records], np.int64),
    }
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
    columns = {name: tensors[name].tolist() for name in _DTYPES}
    experts = tensors[_EXPERTS].numpy() if _EXPERTS in tensors else np.empty(0, np.int16)
    at, version_at, byte, expert_at = 0, 0, 0, 0
    groups: list[RolloutGroup] = []
    for size in tensors[_RECORD_BYTES].tolist():
        record: dict[str, Any] = json.loads(texts[byte : byte + size])
        byte += size
        rollouts: list[Rollout] = []
        for item in record["rollouts"]:
            end, version_end = at + int(item["length"]), version_at + int(item["sampled"])
            routed = None
            if _EXPERTS in item:
                shape = [int(size) for size in item[_EXPERTS]]
                routed = experts[expert_at : expert_at + math.prod(shape)].reshape(shape).copy()
                expert_at += routed.size
            rollouts.append(
                Rollout(
                    group_id=record["group_id"],
                    **{name: item[name] for name in _AS_THEY_ARE},
                    token_ids=columns["token_ids"][at:end],
                    token_mask=columns["token_mask"][at:end],
                    logprobs=columns["logprobs"][at:end],
                    weight_versions=columns["weight_versions"][version_at:version_end],
                    reward=math.nan if item["reward"] is None else float(item["reward"]),
                    turns=[(int(start), int(stop)) for start, stop in item["turns"]],
                    routed_experts=routed,
                )
            )
            at, version_at = end, version_end
        groups.append(
            RolloutGroup(record["group_id"], int(record["prompt_index"]), rollouts, int(record["weight_version"]))
        )
    if at != len(columns["token_ids"]) or version_at != len(columns["weight_versions"]):
        raise EngineError("saved groups and their token tensors do not belong together", where="engine/grpo/buffer.py")
    return groups
