"""Asynchronous GRPO: generation never waits for training, and training never sees a token older than the age bound.

One event loop drives the generator, the environments and the judges; the policy trains in a thread beside it. The
GroupBuffer decides which prompts may start and which groups a step may take (buffer.py holds the age bound). After each
step the new weights are pushed between two decoding steps: running rollouts go on under them.

The numeric part of a step is `train_on`, shared with the synchronous loop (grpo.py).
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from nemotron_steps.engine.buffer import GroupBuffer, Ticket, max_policy_lag
from nemotron_steps.engine.grpo import (
    GrpoRun,
    StepRecord,
    begin_sampling,
    finish_step,
    mean,
    refit,
    restore,
    sample_groups,
    train_on,
    validate,
    validation_due,
)
from nemotron_steps.engine.rollouts import StragglerError
from nemotron_steps.engine.types import RolloutGroup
from nemotron_steps.errors import WorkerLostError

STALL_SECONDS = 60.0
"""With groups in flight and not one token sampled for this long, something is dead."""


def train_async(run: GrpoRun) -> dict[str, Any]:
    """The asynchronous loop, from the newest checkpoint to the last step.

    Returns:
        As `grpo.train`.

    Raises:
        WorkerLostError: nothing moved for STALL_SECONDS.
    """
    with run.checkpoints, asyncio.Runner() as runner:
        return runner.run(_AsyncLoop(run).train())


class _AsyncLoop:
    """The producer (prompts to graded groups) and the trainer, meeting at the buffer."""

    def __init__(self, run: GrpoRun) -> None:
        settings = run.config.grpo.async_grpo
        self.run = run
        self.settings = settings
        self.buffer = GroupBuffer(
            run.config.grpo.num_prompts_per_step,
            settings.max_trajectory_age_steps,
            straggler_deadline_s=settings.straggler_deadline_s,
            num_positions=run.prompts.num_positions,
        )
        self.tasks: dict[str, asyncio.Task[RolloutGroup]] = {}
        self.cuts: dict[str, asyncio.Event] = {}

    async def train(self) -> dict[str, Any]:
        run = self.run
        rewards = self._restore()
        try:
            while run.step < run.total_steps:
                record = StepRecord()
                with record.timer.phase("wait_for_rollouts"):
                    groups = await self._next_groups()
                if groups is None:
                    break
                record.metrics["async/policy_lag_max"] = float(max_policy_lag(groups, run.step))
                tokens_before = run.sampler.generated_tokens
                await self._beside_generation(groups, record)
                with record.timer.phase("drain"):
                    if not self.settings.in_flight_weight_updates:
                        await self._drain()
                refit(run, record)
                begin_sampling(run)
                self._issue()
                step_s = time.perf_counter() - record.started
                record.metrics["tokens/generated_per_s"] = (run.sampler.generated_tokens - tokens_before) / step_s
                record.metrics.update(self.buffer.metrics())
                rewards.append(record.metrics["reward/mean"])
                if validation_due(run):
                    with record.timer.phase("validation"):
                        record.metrics["validation/reward"] = (await validate(run)).reward
                if not finish_step(run, groups, record, rewards, self.buffer):
                    break
        finally:
            for task in self.tasks.values():
                task.cancel()
            await asyncio.gather(*self.tasks.values(), return_exceptions=True)
        return {"steps": run.step, "reward_first": mean(rewards[:5]), "reward_last": mean(rewards[-5:])}

    def _restore(self) -> list[float]:
        rewards = restore(self.run, self.buffer)
        self.buffer.next_step = self.run.step
        begin_sampling(self.run)
        return rewards

    async def _beside_generation(self, groups: list[RolloutGroup], record: StepRecord) -> None:
        """Train in a thread while the event loop goes on generating and judging."""
        training = asyncio.ensure_future(asyncio.to_thread(train_on, self.run, groups, record))
        while not training.done():
            self._issue()
            await asyncio.wait({training, *self.tasks.values()}, return_when=asyncio.FIRST_COMPLETED)
            self._gather()
        training.result()

    async def _next_groups(self) -> list[RolloutGroup] | None:
        """The groups of the next step; None when the prompts are used up."""
        last_progress = (time.monotonic(), self.run.sampler.generated_tokens)
        while True:
            self._gather()
            groups = self.buffer.take(self.run.step)
            if groups is not None:
                return groups
            if self.buffer.exhausted and not self.tasks:
                return None
            self._issue()
            self._cut_stragglers()
            if not self.tasks:
                return None
            await asyncio.wait(self.tasks.values(), return_when=asyncio.FIRST_COMPLETED, timeout=1.0)
            tokens = self.run.sampler.generated_tokens
            if tokens != last_progress[1] or any(t.done() for t in self.tasks.values()):
                last_progress = (time.monotonic(), tokens)
            elif time.monotonic() - last_progress[0] > STALL_SECONDS:
                raise WorkerLostError(
                    f"no rollout has moved for {STALL_SECONDS:.0f} s: a generator, environment or judge is dead",
                    found=f"{self.buffer.in_flight} groups in flight, {self.buffer.ready} ready",
                    hints=["steps run ... --resume RUN", "grpo.async_grpo.straggler_deadline_s=300"],
                )

    def _issue(self) -> None:
        """Start as many groups as the age bound allows."""
        version = self.run.generator.weight_version
        while self.buffer.can_issue(version):
            ticket = self.buffer.issue(version, time.monotonic())
            cut = asyncio.Event()
            self.cuts[ticket.group_id] = cut
            self.tasks[ticket.group_id] = asyncio.ensure_future(self._generate(ticket, cut))

    async def _generate(self, ticket: Ticket, cut: asyncio.Event) -> RolloutGroup:
        prompt = self.run.prompts.at(ticket.position)
        groups = await sample_groups(self.run, [prompt], group_ids=[ticket.group_id], cuts=[cut])
        return groups[0]

    def _gather(self) -> None:
        """Move finished groups into the buffer; a group that straggled goes back to its prompt's queue."""
        for group_id in [g for g, task in self.tasks.items() if task.done()]:
            task = self.tasks.pop(group_id)
            cut = self.cuts.pop(group_id)
            try:
                self.buffer.complete(task.result(), partial=cut.is_set())
            except StragglerError:
                self.buffer.withdraw(group_id, "straggler")

    def _cut_stragglers(self) -> None:
        for ticket in [*self.buffer.overdue(time.monotonic()), *self.buffer.unreachable()]:
            self.cuts[ticket.group_id].set()

    async def _drain(self) -> None:
        """Without in-flight updates, everything running ends under the weights it began with."""
        while self.tasks:
            await asyncio.wait(self.tasks.values(), return_when=asyncio.FIRST_COMPLETED)
            self._gather()
