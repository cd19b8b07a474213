"""Asynchronous GRPO: generation goes on while the policy trains, and training never sees a token older than the bound.

One event loop drives generator, environments and judges; the policy trains, and its checkpoints are written, in a
thread beside it. The GroupBuffer decides which prompts may start, and promises each of them to a step.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from nemotron_steps.engine.grpo import loop
from nemotron_steps.engine.grpo.buffer import MAX_FAILURES, GroupBuffer, max_policy_lag
from nemotron_steps.engine.grpo.filters import (
    Judged,
    has_no_verdict,
    has_signal,
    is_ungraded,
    too_few_groups,
)
from nemotron_steps.engine.grpo.loop import GrpoRun, StepRecord
from nemotron_steps.engine.types import RolloutGroup
from nemotron_steps.errors import DataError

SAY_SECONDS = 30.0
"""A step that has waited so long for its groups says so, and again after twice the time."""


def train_async(run: GrpoRun, runner: asyncio.Runner | None = None) -> dict[str, Any]:
    """The asynchronous loop, from the newest checkpoint to the last step; as `grpo.train` otherwise."""
    with run.checkpoints, nullcontext(runner) if runner is not None else asyncio.Runner() as runner:
        return runner.run(_AsyncLoop(run).train())


class _AsyncLoop:
    """The producer (prompts to graded groups) and the trainer, meeting at the buffer."""

    def __init__(self, run: GrpoRun) -> None:
        self.run = run
        self.grpo = run.config.grpo
        self.buffer = GroupBuffer(
            self.grpo.num_prompts_per_step,
            self.grpo.async_grpo.max_trajectory_age_steps,
            num_positions=run.prompts.num_positions,
            num_steps=run.total_steps,
        )
        self.tasks: dict[str, asyncio.Task[list[RolloutGroup]]] = {}
        self.judged = Judged()
        """Since the last step was taken."""
        self.reported_drops = 0

    async def train(self) -> dict[str, Any]:
        run = self.run
        loop.restore(run, self.buffer)
        self.reported_drops = len(self.buffer.dropped)
        loop.begin_sampling(run)
        try:
            if self.grpo.val_at_start and run.step == 0:
                run.reporter.metrics(0, await loop.validate(run))
            run.checkpoints.steps_begin()
            while run.step < run.total_steps:
                record = StepRecord()
                tokens_before = run.sampler.generated_tokens
                with record.timer.phase("wait_for_rollouts"):
                    groups = await self._next_groups(record)
                if groups is None:
                    await self._end_early()
                    break
                record.metrics["async/policy_lag_max"] = float(max_policy_lag(groups, run.step))
                judged, self.judged = self.judged, Judged()
                if self.grpo.use_dynamic_sampling:  # the surplus is kept
                    record.metrics.update(judged.metrics(judged.offered / self.grpo.num_prompts_per_step, 0))
                await self._beside_generation(loop.train_on, run, groups, record)
                with record.timer.phase("drain"):
                    if not self.grpo.async_grpo.in_flight_weight_updates:
                        await self._drain()
                loop.refit(run, record)
                loop.begin_sampling(run)
                self._issue()
                step_s = time.perf_counter() - record.started
                record.metrics["tokens/generated_per_s"] = (run.sampler.generated_tokens - tokens_before) / step_s
                record.metrics.update(self.buffer.metrics())
                if loop.validation_due(run):
                    with record.timer.phase("validation"):
                        record.metrics.update(await loop.validate(run))
                outcomes, state = self._outcomes(), self.buffer.state()  # of the same moment
                saved = loop.report_step(run, groups, record, outcomes)
                if saved:
                    await self._beside_generation(loop.save_step, run, record, state)
                loop.refuse_to_go_on(run, record, saved)
        finally:
            for task in self.tasks.values():
                task.cancel()
            await asyncio.gather(*self.tasks.values(), return_exceptions=True)
        return loop.summary_of(run)

    async def _end_early(self) -> None:
        """The prompts are used up before the last step: some were dropped, or had no signal."""
        run = self.run
        if self.grpo.use_dynamic_sampling:
            raise loop.prompts_used_up(run, self.buffer.ready, self.judged.offered)
        if run.step == 0:
            raise DataError(
                "no step can be filled: the rollouts of too many prompts failed",
                expected=f"{self.grpo.num_prompts_per_step} groups",
                found=f"{self.buffer.ready}; {len(self.buffer.dropped)} prompts failed {MAX_FAILURES} times each",
                hints=["grpo.async_grpo.straggler_deadline_s=null", "policy.generation.max_new_tokens=1024"],
            )
        run.reporter.event("prompts_used_up", step=run.step, dropped=len(self.buffer.dropped))
        run.reporter.groups(run.step + 1, self._outcomes())
        if self.grpo.val_at_end and run.step not in run.validated:
            run.reporter.metrics(run.step, await loop.validate(run))
        run.checkpoints.wait()
        latest = run.checkpoints.latest()
        if run.config.checkpointing.enabled and (latest is None or latest.step < run.step):
            loop.save_step(run, StepRecord(), self.buffer.state())

    async def _beside_generation(self, work: Callable[..., None], *arguments: Any) -> None:
        """Train or save in a thread while the event loop goes on generating and judging."""
        working = asyncio.ensure_future(asyncio.to_thread(work, *arguments))
        try:
            while not working.done():
                self._issue()
                await self._wait_for_groups(working)
        finally:
            await asyncio.wait({working})  # a thread cannot be cancelled, and what it uses is closed next
        working.result()

    async def _next_groups(self, record: StepRecord) -> list[RolloutGroup] | None:
        """The groups of the next step; None when the prompts are used up."""
        run, began, say_after = self.run, _now(), SAY_SECONDS
        awaited_at_first: int | None = None
        self._gather()
        while True:
            groups = self.buffer.take()
            if groups is not None:
                record.metrics["async/waited_s"] = _now() - began
                record.metrics["async/awaited_groups"] = float(awaited_at_first or 0)
                return groups
            awaited = self.buffer.awaited()
            if _now() - began >= say_after and awaited:
                run.reporter.event(
                    "waiting_for_groups",
                    step=run.step + 1,
                    waited_s=_now() - began,
                    groups=len(awaited),
                    ready=self.buffer.ready,
                    longest=run.prompts.at(awaited[0].position).where,
                    longest_s=_now() - awaited[0].issued_at,
                )
                run.reporter.progress(f"grpo  waiting for {len(awaited)} groups", run.step, run.total_steps)
                say_after *= 2
            if self.buffer.exhausted and not self.tasks:
                return None
            self._refuse_hopeless()
            self._issue()
            if not self.tasks:
                return None
            awaited_at_first = len(self.buffer.awaited()) if awaited_at_first is None else awaited_at_first
            await self._wait_for_groups()

    async def _wait_for_groups(self, *besides: asyncio.Future[Any]) -> None:
        """Wait until a group or something besides is done, and gather them. A dead worker fails its groups itself."""
        waiting = {*besides, *self.tasks.values()}
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED, timeout=1.0)
        self._gather()

    def _outcomes(self) -> list[dict[str, Any]]:
        """What became of prompts since the last step, as Reporter.groups takes it."""
        prompts = self.run.prompts
        return [{"prompt": prompts.at(each["position"]).index, **each} for each in self.buffer.outcomes()]

    def _refuse_hopeless(self) -> None:
        """Dynamic sampling gives up after as many groups as the synchronous loop does."""
        if self._may_ask_no_more(self.judged.offered):
            raise too_few_groups(self.buffer.ready, self.judged.offered, self.grpo)

    def _may_ask_no_more(self, groups: int) -> bool:
        """Whether so many groups are all that dynamic sampling has for a step, and the next one is not full yet."""
        needed = self.grpo.num_prompts_per_step
        allowed = needed * self.grpo.dynamic_sampling_max_gen_batches
        return self.grpo.use_dynamic_sampling and self.buffer.ready < needed and groups >= allowed

    def _issue(self) -> None:
        """Start as many groups as the age bound and dynamic sampling allow."""
        version = self.run.generator.weight_version
        while self.buffer.can_issue(version) and not self._may_ask_no_more(self.judged.offered + len(self.tasks)):
            ticket = self.buffer.issue(version, _now())
            prompt, deadline_s = self.run.prompts.at(ticket.position), self.grpo.async_grpo.straggler_deadline_s
            sampling = loop.sample_groups(self.run, [prompt], [ticket.group_id], deadline_s)
            self.tasks[ticket.group_id] = asyncio.ensure_future(sampling)

    def _gather(self) -> None:
        """Move finished groups into the buffer."""
        for group_id in [g for g, task in self.tasks.items() if task.done()]:
            (group,) = self.tasks.pop(group_id).result()
            if is_ungraded(group) or has_no_verdict(group):
                self.judged.ungraded += is_ungraded(group)
                (self.buffer.withdraw if is_ungraded(group) else self.buffer.discard)(group_id, "ungraded")
                continue
            self.buffer.complete(group)
            self.judged.offered += 1
            if self.grpo.use_dynamic_sampling and not has_signal(group, self.grpo):
                self.buffer.discard(group_id, "no_signal")
                self.judged.without_signal += 1
        for position in self.buffer.dropped[self.reported_drops :]:
            prompt = self.run.prompts.at(position)
            self.run.reporter.event("prompt_dropped", position=position, where=prompt.where, failures=MAX_FAILURES)
        self.reported_drops = len(self.buffer.dropped)

    async def _drain(self) -> None:
        """Everything running ends under the weights it began with. What failed is replaced meanwhile, so that what the
        buffer holds afterwards does not depend on how long training took."""
        while True:
            self._refuse_hopeless()
            self._issue()
            if not self.tasks:
                return
            await self._wait_for_groups()


def _now() -> float:
    """Seconds on the event loop's clock."""
    return asyncio.get_running_loop().time()
