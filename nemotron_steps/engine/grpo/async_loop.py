"""Asynchronous GRPO: generation goes on while the policy trains, and training never sees a token older than the bound.

One event loop drives the generator, the environments and the judges; the policy trains, and its checkpoints are
written, in a thread beside it. The GroupBuffer decides which prompts may start, and promises each of them to a step,
which waits for it (buffer.py holds the age bound). After each step the new weights are pushed between two decoding
steps: running rollouts go on under them.

Dynamic sampling discards groups without a signal as they come; what is left over opens the next step, within the age
bound. The numeric part of a step is `train_on`, shared with the synchronous loop (loop.py).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

from nemotron_steps.engine.grpo import loop
from nemotron_steps.engine.grpo.buffer import MAX_FAILURES, GroupBuffer, Ticket, max_policy_lag
from nemotron_steps.engine.grpo.filters import (
    failures_of,
    has_no_verdict,
    has_signal,
    is_ungraded,
    too_few_groups,
    unshaped_rewards,
)
from nemotron_steps.engine.grpo.loop import GrpoRun, StepRecord
from nemotron_steps.engine.rollouts.collector import StragglerError
from nemotron_steps.engine.types import RolloutGroup
from nemotron_steps.errors import DataError

SAY_SECONDS = 30.0
"""A step that has waited so long for its groups says so, and again after twice the time."""


def train_async(run: GrpoRun, runner: asyncio.Runner | None = None) -> dict[str, Any]:
    """The asynchronous loop, from the newest checkpoint to the last step."""
    with run.checkpoints, nullcontext(runner) if runner is not None else asyncio.Runner() as runner:
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
            num_steps=run.total_steps,
        )
        self.tasks: dict[str, asyncio.Task[RolloutGroup]] = {}
        self.cuts: dict[str, asyncio.Event] = {}
        self.offered = 0
        """Groups judged since the last step was taken."""
        self.without_signal = 0
        """Of those, how many dynamic sampling discarded."""
        self.ungraded = 0
        """Groups beside them that nobody graded, whose prompts dynamic sampling tries again."""
        self.untrained: list[str | None] = []
        """Failure class, or None, of each rollout of all that dynamic sampling left out since."""
        self.reported_drops = 0

    async def train(self) -> dict[str, Any]:
        run = self.run
        loop.restore(self.run, self.buffer)
        self.reported_drops = len(self.buffer.dropped)
        loop.begin_sampling(self.run)
        try:
            if run.config.grpo.val_at_start and run.step == 0:
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
                record.metrics.update(self._sampling_metrics())
                record.untrained, self.untrained = self.untrained, []
                await self._beside_generation(loop.train_on, run, groups, record)
                with record.timer.phase("drain"):
                    if not self.settings.in_flight_weight_updates:
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
        if run.config.grpo.use_dynamic_sampling:
            raise loop.prompts_used_up(run, self.buffer.ready, self.offered)
        if run.step == 0:
            raise DataError(
                "no step can be filled: the rollouts of too many prompts failed",
                expected=f"{run.config.grpo.num_prompts_per_step} groups",
                found=f"{self.buffer.ready}; {len(self.buffer.dropped)} prompts failed {MAX_FAILURES} times each",
                hints=["grpo.async_grpo.straggler_deadline_s=null", "policy.generation.max_new_tokens=1024"],
            )
        run.reporter.event("prompts_used_up", step=run.step, dropped=len(self.buffer.dropped))
        run.reporter.groups(run.step + 1, self._outcomes())
        if run.config.grpo.val_at_end and run.step not in run.validated:
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
                self._cut_stragglers()
                waiting = {working, *self.tasks.values()}
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED, timeout=1.0)
                self._gather()
        finally:
            await asyncio.wait({working})  # a thread cannot be cancelled, and what it uses is closed next
        working.result()

    async def _next_groups(self, record: StepRecord) -> list[RolloutGroup] | None:
        """The groups of the next step; None when the prompts are used up."""
        began, say_after = _now(), SAY_SECONDS
        awaited: int | None = None
        while True:
            self._gather()
            groups = self.buffer.take(self.run.step)
            self._report_drops()
            if groups is not None:
                record.metrics["async/waited_s"] = _now() - began
                record.metrics["async/awaited_groups"] = float(awaited or 0)
                return groups
            if _now() - began >= say_after:
                self._say_waiting(_now() - began)
                say_after *= 2
            if self.buffer.exhausted and not self.tasks:
                return None
            self._refuse_hopeless()
            self._issue()
            if not self.tasks:
                return None
            awaited = len(self.buffer.awaited()) if awaited is None else awaited
            await self._wait_for_groups()

    async def _wait_for_groups(self) -> None:
        """Wait until a group finishes, or a moment; cut those that straggle. A dead worker fails its groups itself."""
        self._cut_stragglers()
        await asyncio.wait(self.tasks.values(), return_when=asyncio.FIRST_COMPLETED, timeout=1.0)

    def _say_waiting(self, waited_s: float) -> None:
        """Which groups keep the step waiting, in the log and on the screen."""
        run, awaited = self.run, self.buffer.awaited()
        if not awaited:
            return
        longest = awaited[0]
        run.reporter.event(
            "waiting_for_groups",
            step=run.step + 1,
            waited_s=waited_s,
            groups=len(awaited),
            ready=self.buffer.ready,
            longest=run.prompts.at(longest.position).where,
            longest_s=_now() - longest.issued_at,
        )
        run.reporter.progress(f"grpo  waiting for {len(awaited)} groups", run.step, run.total_steps)

    def _outcomes(self) -> list[dict[str, Any]]:
        """What became of prompts since the last step, as Reporter.groups takes it."""
        return [{"prompt": self.run.prompts.at(each.position).index, **asdict(each)} for each in self.buffer.outcomes()]

    def _refuse_hopeless(self) -> None:
        """Dynamic sampling gives up after as many groups as the synchronous loop does."""
        if not self._may_ask_no_more(self.offered):
            return
        grpo = self.run.config.grpo
        raise too_few_groups(
            self.buffer.ready,
            grpo.num_prompts_per_step,
            self.offered,
            grpo.dynamic_sampling_max_gen_batches,
            grpo.num_generations_per_prompt,
        )

    def _may_ask_no_more(self, groups: int) -> bool:
        """Whether so many groups are all that dynamic sampling has for a step, and the next one is not full yet."""
        grpo = self.run.config.grpo
        needed = grpo.num_prompts_per_step
        allowed = needed * grpo.dynamic_sampling_max_gen_batches
        return grpo.use_dynamic_sampling and self.buffer.ready < needed and groups >= allowed

    def _sampling_metrics(self) -> dict[str, float]:
        """Of dynamic sampling, for the step just taken; as DynamicSampler.metrics, with the surplus kept."""
        grpo, offered = self.run.config.grpo, self.offered
        self.offered = 0
        if not grpo.use_dynamic_sampling:
            return {}
        without, self.without_signal = self.without_signal, 0
        ungraded, self.ungraded = self.ungraded, 0
        return {
            "dynamic_sampling/batches": offered / grpo.num_prompts_per_step,
            "dynamic_sampling/discarded_share": without / offered if offered else 0.0,
            "dynamic_sampling/surplus_groups": 0.0,
            "dynamic_sampling/ungraded_groups": float(ungraded),
        }

    def _issue(self) -> None:
        """Start as many groups as the age bound and dynamic sampling allow."""
        version = self.run.generator.weight_version
        while self.buffer.can_issue(version) and not self._may_ask_no_more(self.offered + len(self.tasks)):
            ticket = self.buffer.issue(version, _now())
            cut = asyncio.Event()
            self.cuts[ticket.group_id] = cut
            self.tasks[ticket.group_id] = asyncio.ensure_future(self._generate(ticket, cut))

    async def _generate(self, ticket: Ticket, cut: asyncio.Event) -> RolloutGroup:
        prompt = self.run.prompts.at(ticket.position)
        groups = await loop.sample_groups(self.run, [prompt], group_ids=[ticket.group_id], cuts=[cut])
        return groups[0]

    def _gather(self) -> None:
        """Move finished groups into the buffer; a group that straggled goes back to its prompt's queue."""
        grpo = self.run.config.grpo
        for group_id in [g for g, task in self.tasks.items() if task.done()]:
            task = self.tasks.pop(group_id)
            cut = self.cuts.pop(group_id)
            try:
                group = task.result()
            except StragglerError:
                self.buffer.withdraw(group_id, "straggler")
                continue
            if is_ungraded(group) or has_no_verdict(group):
                self.ungraded += is_ungraded(group)
                self.untrained += failures_of(group)
                (self.buffer.withdraw if is_ungraded(group) else self.buffer.discard)(group_id, "ungraded")
                continue
            self.buffer.complete(group, partial=cut.is_set())
            self.offered += 1
            if grpo.use_dynamic_sampling and not has_signal(unshaped_rewards(group, grpo.reward_scaling)):
                self.buffer.discard(group_id, "no_signal")
                self.without_signal += 1
                self.untrained += failures_of(group)
        self._report_drops()

    def _report_drops(self) -> None:
        for position in self.buffer.dropped[self.reported_drops :]:
            prompt = self.run.prompts.at(position)
            self.run.reporter.event("prompt_dropped", position=position, where=prompt.where, failures=MAX_FAILURES)
        self.reported_drops = len(self.buffer.dropped)

    def _cut_stragglers(self) -> None:
        for ticket in self.buffer.overdue(_now()):
            self.cuts[ticket.group_id].set()

    async def _drain(self) -> None:
        """Everything running ends under the weights it began with. What failed is replaced meanwhile, so that what the
        buffer holds afterwards does not depend on how long training took."""
        while True:
            self._refuse_hopeless()
            self._issue()
            if not self.tasks:
                return
            await self._wait_for_groups()
            self._gather()


def _now() -> float:
    """Seconds on the event loop's clock."""
    return asyncio.get_running_loop().time()
