"""GRPO, read top to bottom: sample groups, judge them, turn rewards into advantages, update, refit.

Everything numeric is a pure function elsewhere (step.py, losses/), and backends are chosen in setup/. The asynchronous
loop (async_loop.py) is made of the same `train_on`, `refit`, `report_step` and `save_step`.
"""

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

import torch

from nemotron_steps.config.schema.rl import RlConfig
from nemotron_steps.engine.batching import select_rows
from nemotron_steps.engine.checkpoints import CheckpointManager
from nemotron_steps.engine.generation.sampler import AsyncSampler
from nemotron_steps.engine.grpo.buffer import MAX_FAILURES, GroupBuffer, encode_groups
from nemotron_steps.engine.grpo.filters import (
    DynamicSampler,
    FailureWatch,
    has_no_verdict,
    is_ungraded,
    more_signal,
    refuse_ungraded,
)
from nemotron_steps.engine.grpo.rewards import RewardPenalties, reward_brevity
from nemotron_steps.engine.grpo.step import (
    Distillation,
    finish_batch,
    needs_prev_logprobs,
    needs_reference_logprobs,
    prepare_batch,
)
from nemotron_steps.engine.losses.loss import SampledFrom, combine_updates
from nemotron_steps.engine.reporting import PhaseTimer, Reporter, first_and_last
from nemotron_steps.engine.rollouts.collector import RolloutCollector
from nemotron_steps.engine.rollouts.data import PromptRow, PromptStream
from nemotron_steps.engine.rollouts.evaluation import EvaluationResult, before_and_after, summarize
from nemotron_steps.engine.schedules import sequence_length
from nemotron_steps.engine.signals import Signal, SignalMonitor
from nemotron_steps.engine.types import Generator, Policy, RolloutGroup
from nemotron_steps.environments.judged.judge_transcripts import JUDGE_NOTES
from nemotron_steps.errors import DataError, EngineError


class StepwiseJudge(Protocol):
    """A judge whose random streams follow the training step."""

    def start_step(self, step: str) -> None:
        """Name the training step that the following questions belong to."""


@dataclass
class GrpoRun:
    """The live parts of one training run."""

    config: RlConfig
    policy: Policy
    generator: Generator
    sampler: AsyncSampler
    collector: RolloutCollector
    judges: Sequence[StepwiseJudge]
    prompts: PromptStream
    validation: Sequence[PromptRow]
    checkpoints: CheckpointManager
    reporter: Reporter
    signals: SignalMonitor
    reward_penalties: RewardPenalties | None = None
    distillation: Distillation | None = None
    resources: ExitStack = field(default_factory=ExitStack)
    """What ends with the run: engines, actors, servers."""
    step: int = 0
    """Steps trained so far; also the weight version that the generator holds after a refit."""
    rewards: list[float] = field(default_factory=list)
    """Mean reward of every step so far, those before a resume included."""
    validated: dict[int, EvaluationResult] = field(default_factory=dict)
    """Steps trained → the validation after them: the one before the first step, and the newest."""
    failures: FailureWatch = field(init=False)

    def __post_init__(self) -> None:
        grpo = self.config.grpo
        rows = self.prompts.num_rows
        self.failures = FailureWatch(grpo.num_prompts_per_step, grpo.num_generations_per_prompt, rows)

    def close(self) -> None:
        """Free everything."""
        self.resources.close()

    @property
    def total_steps(self) -> int:
        """Steps of the whole run: grpo.max_num_steps, or what the data gives in grpo.max_num_epochs."""
        return self.prompts.num_steps(self.config.grpo.max_num_steps)


@dataclass
class StepRecord:
    """What one step measured on its way."""

    timer: PhaseTimer = field(default_factory=PhaseTimer)
    metrics: dict[str, float] = field(default_factory=dict)
    started: float = field(default_factory=time.perf_counter)
    stopped_by: Signal | None = None
    """The first signal holding after the step that `signals.stop_on` names."""
    retries: Counter[int] = field(default_factory=Counter)
    """How often a prompt was sampled for the step before, by its index; synchronously."""


def train(run: GrpoRun, runner: asyncio.Runner | None = None) -> dict[str, Any]:
    """The synchronous loop, from the newest checkpoint to the last step."""
    restore(run)
    with run.checkpoints, nullcontext(runner) if runner is not None else asyncio.Runner() as runner:
        if run.config.grpo.val_at_start and run.step == 0:
            run.reporter.metrics(0, runner.run(validate(run)))
        run.checkpoints.steps_begin()
        stream = iter(run.prompts)
        while run.step < run.total_steps:
            prompts = next(stream, None)
            if prompts is None:  # dynamic sampling went through all prompts, the last step's included
                raise prompts_used_up(run, 0, 0)
            record = StepRecord()
            tokens_before = run.sampler.generated_tokens
            with record.timer.phase("generation"):
                groups = run_on(runner, sample_step(run, prompts, record))
            sampled, seconds = run.sampler.generated_tokens - tokens_before, record.timer.seconds["generation"]
            record.metrics["tokens/generated_per_s"] = sampled / max(seconds, 1e-9)
            run.generator.finish_generation()
            train_on(run, groups, record)
            refit(run, record)
            if validation_due(run):
                with record.timer.phase("validation"):
                    record.metrics.update(runner.run(validate(run)))
            outcomes = [
                {
                    "prompt": group.prompt_index,
                    "attempt": record.retries[group.prompt_index],
                    "outcome": "ungraded" if has_no_verdict(group) else "trained",
                }
                for group in groups
            ]
            saved = report_step(run, groups, record, outcomes)
            if saved:
                save_step(run, record)
            refuse_to_go_on(run, record, saved)
    return summary_of(run)


Result = TypeVar("Result")


def run_on(runner: asyncio.Runner, coroutine: Coroutine[Any, Any, Result]) -> Result:
    """As `runner.run`, which formats its finished task as text where it has a Ctrl-C handler, a step's tokens with it:
    seconds a step."""
    results: list[Result] = []

    async def keep() -> None:
        results.append(await coroutine)

    runner.run(keep())
    return results[0]


def summary_of(run: GrpoRun) -> dict[str, Any]:
    """What a run that is over came to: steps, rewards, and validation before and after."""
    summary: dict[str, Any] = {"steps": run.step, **first_and_last("reward", run.rewards)}
    if {0, run.step} <= run.validated.keys():
        summary.update(before_and_after("validation", run.validated[0], run.validated[run.step]))
    elif run.validated:
        step = max(run.validated)
        summary[f"validation_reward_step_{step}"] = run.validated[step].reward
    return summary


def restore(run: GrpoRun, buffer: GroupBuffer | None = None) -> None:
    """Load the newest checkpoint, if any, and give the generator the policy's weights."""
    latest = run.checkpoints.latest()
    if latest is not None:
        state = latest.state()
        run.policy.load_checkpoint(latest.policy_path)
        run.prompts.load_state_dict(state["prompts"])
        run.signals.load_state_dict(state["signals"])
        run.step = latest.step
        run.rewards = list(state["rewards"])
        run.validated = {int(step): EvaluationResult(**figures) for step, figures in state["validated"].items()}
        if buffer is not None:
            buffer.load_state_dict(state["buffer"], latest.tensors())
        run.reporter.event("resumed", step=run.step)
        if 0 in run.validated:
            run.reporter.metrics(0, run.validated[0].metrics("validation"))
    run.generator.update_weights(run.policy.weights(), run.step)


async def sample_step(run: GrpoRun, prompts: list[PromptRow], record: StepRecord) -> list[RolloutGroup]:
    """The step's groups: one batch of prompts, or as many as dynamic sampling needs."""
    grpo = run.config.grpo
    begin_sampling(run)
    if not grpo.use_dynamic_sampling:
        return await _sample_prompts(run, prompts, record)
    sampler = DynamicSampler(grpo, len(prompts))
    more = iter(run.prompts)
    while True:
        groups = await sample_groups(run, prompts, _ids(f"{run.step}.{sampler.batches}", prompts))
        ungraded = [prompts[position] for position in sampler.offer(groups)]
        if sampler.complete:
            break
        prompts = [prompt for prompt in ungraded if _is_tried_again(run, prompt, record)] or next(more, [])
        if not prompts:
            raise prompts_used_up(run, len(sampler.kept), sampler.offered)
    taken = sampler.take()  # the surplus is dropped: docs/decisions/dynamic-sampling-surplus.md
    record.metrics.update(sampler.metrics(sampler.batches, len(sampler.kept)))
    return taken


async def _sample_prompts(run: GrpoRun, prompts: list[PromptRow], record: StepRecord) -> list[RolloutGroup]:
    """One group a prompt, ungraded ones tried again. Where nothing at all is graded, other prompts take their place."""
    more = iter(run.prompts)
    groups = await sample_groups(run, prompts, _ids(f"{run.step}", prompts))
    newest: Sequence[int] = range(len(prompts))
    for attempt in itertools.count(1):
        newest = [i for i in newest if is_ungraded(groups[i]) and _is_tried_again(run, prompts[i], record)]
        if newest:
            ids = [f"{run.step}.{attempt}/{i}" for i in newest]
            for i, group in zip(newest, await sample_groups(run, [prompts[i] for i in newest], ids), strict=True):
                groups[i] = group
        elif all(map(has_no_verdict, groups)) and (prompts := next(more, [])):
            groups = await sample_groups(run, prompts, _ids(f"{run.step}.{attempt}", prompts))
            newest = range(len(prompts))
        else:
            break
    return groups


def _is_tried_again(run: GrpoRun, prompt: PromptRow, record: StepRecord) -> bool:
    """Whether a prompt that has just failed gets another attempt in this step."""
    if record.retries[prompt.index] + 1 >= MAX_FAILURES:
        run.reporter.event("prompt_dropped", where=prompt.where, failures=MAX_FAILURES)
        return False
    record.retries[prompt.index] += 1
    return True


def prompts_used_up(run: GrpoRun, kept: int, offered: int) -> DataError:
    """What to say when dynamic sampling went through all prompts before a step was full."""
    grpo = run.config.grpo
    hopeless = offered > 0 and kept == 0 and run.step == 0  # another epoch would find as little
    again = [f"grpo.max_num_epochs={grpo.max_num_epochs + 1}"]
    return DataError(
        "dynamic sampling used up the prompts before the step was full",
        expected=f"{grpo.num_prompts_per_step} groups whose rewards differ",
        found=f"{kept} of {offered}",
        hints=more_signal(grpo.num_generations_per_prompt) if hopeless else [*again, "grpo.use_dynamic_sampling=false"],
    )


def _ids(prefix: str, prompts: Sequence[PromptRow]) -> list[str]:
    return [f"{prefix}/{position}" for position in range(len(prompts))]


def begin_sampling(run: GrpoRun) -> None:
    """Set what depends on the step: sequence length, and the judges' random streams."""
    policy = run.config.policy
    run.collector.max_total_length = sequence_length(
        run.step,
        run.total_steps,
        policy.max_total_sequence_length,
        policy.max_total_sequence_length_end,
        multiple=policy.make_sequence_length_divisible_by,
    )
    for judge in run.judges:
        judge.start_step(str(run.step))


async def sample_groups(
    run: GrpoRun,
    prompts: Sequence[PromptRow],
    group_ids: Sequence[str],
    deadline_s: float | None = None,
) -> list[RolloutGroup]:
    """Sample and judge prompts; some rollouts gain or lose reward by how they are written: low effort, penalties."""
    begun = [run.failures.began(prompt) for prompt in prompts]
    groups = await run.collector.collect(
        prompts,
        group_ids=group_ids,
        num_generations=run.config.grpo.num_generations_per_prompt,
        deadline_s=deadline_s,
    )
    for number, prompt, group in zip(begun, prompts, groups, strict=True):
        run.failures.saw(number, prompt, group)
    if run.distillation is not None:
        run.distillation.mark(prompts, groups)
    groups = reward_brevity(prompts, groups, run.config.grpo.low_effort)
    return groups if run.reward_penalties is None else run.reward_penalties.apply(groups)


def train_on(run: GrpoRun, groups: Sequence[RolloutGroup], record: StepRecord) -> None:
    """One step's updates. Advances run.step; metrics and phase times go into `record`."""
    config = run.config
    refuse_ungraded(groups)
    with record.timer.phase("prepare"):
        prepared = prepare_batch(
            groups,
            config.grpo,
            step=run.step,
            total_steps=run.total_steps,
            max_response_length=config.policy.generation.max_new_tokens,
            length_multiple=config.policy.make_sequence_length_divisible_by,
        )
    with record.timer.phase("logprobs"):
        if needs_prev_logprobs(config.grpo, config.loss_fn):
            prepared.batch.prev_logprobs = run.policy.logprobs(prepared.batch)
    with record.timer.phase("reference_logprobs"):
        if needs_reference_logprobs(config.loss_fn):
            prepared.batch.reference_logprobs = run.policy.reference_logprobs(prepared.batch)
    with record.timer.phase("teacher_logprobs"):
        if run.distillation is not None:
            run.distillation.score(prepared)
    with record.timer.phase("prepare"):
        truncated = SampledFrom.of(config.policy.generation).truncated
        batch, metrics = finish_batch(prepared, config.grpo, config.loss_fn, config.env.nemo_gym, truncated=truncated)
        record.metrics.update(metrics if run.distillation is None else run.distillation.own_metrics(metrics))
    with record.timer.phase("train"):
        size = config.policy.train_global_batch_size  # which divides a step's rollouts: config/layout/constraints.py
        parts = [range(start, start + size) for start in range(0, len(batch), size)]
        updates = [run.policy.train_step(select_rows(batch, part)) for part in parts]
    record.metrics.update(combine_updates(updates))
    tokens = int(batch.lengths.sum())
    record.metrics["tokens/trained_per_s"] = tokens / max(record.timer.seconds["train"], 1e-9)
    run.step += 1
    run.rewards.append(record.metrics["reward/mean"])


def refit(run: GrpoRun, record: StepRecord) -> None:
    """Give the generator the policy's weights; their version is the number of steps trained."""
    with record.timer.phase("refit"):
        report = run.generator.update_weights(run.policy.weights(), run.step)
    record.metrics["weight_sync/seconds"] = report.seconds
    record.metrics["weight_sync/bytes"] = float(report.bytes)


def report_step(
    run: GrpoRun, groups: Sequence[RolloutGroup], record: StepRecord, outcomes: Sequence[Mapping[str, Any]]
) -> bool:
    """Log the step just trained, raise signals; whether it is to be saved. It comes before `save_step`: what a
    checkpoint holds has been reported, wherever a kill comes."""
    record.metrics.update(record.timer.metrics())
    record.metrics.update(run.failures.metrics())
    record.metrics["timing/step_s"] = time.perf_counter() - record.started
    signals = run.signals.update(run.step, record.metrics)  # before they are saved: a resumed run goes on from them
    run.checkpoints.check()
    record.stopped_by = run.signals.stopping
    due = run.checkpoints.due(run.step, record.stopped_by is not None or run.step >= run.total_steps)
    run.reporter.groups(run.step, outcomes)
    for signal in signals:
        run.reporter.signal(signal.name, step=signal.step, message=signal.message, **signal.numbers)
    graded = sorted((r for r in groups[0].rollouts if r.failure is None), key=lambda r: r.reward)
    for which, rollout in zip(("best", "worst"), graded[-1:] + graded[:-1][:1], strict=False):
        sample = {
            "step": run.step,
            "which": which,
            "environment": rollout.environment,
            **run.collector.shown(rollout),
            "reward": rollout.reward,
            "components": rollout.components,
            **{key: notes for key, notes in rollout.metadata.items() if key == JUDGE_NOTES},
        }
        run.reporter.sample(sample)
    run.reporter.metrics(run.step, record.metrics)
    run.reporter.progress(f"grpo  reward {record.metrics['reward/mean']:.3f}", run.step, run.total_steps)
    return due


def save_step(
    run: GrpoRun, record: StepRecord, buffered: tuple[dict[str, Any], list[RolloutGroup]] | None = None
) -> None:
    """Checkpoint the step just trained, with the asynchronous loop's buffer. The event says what training waited."""
    started = time.perf_counter()
    state: dict[str, Any] = {
        "prompts": run.prompts.state_dict(),
        "signals": run.signals.state_dict(),
        "rewards": run.rewards,
        "validated": {step: result.to_dict() for step, result in run.validated.items()},
        "metrics": record.metrics,
    }
    tensors: dict[str, torch.Tensor] = {}
    if buffered is not None:
        state["buffer"], tensors = buffered[0], encode_groups(buffered[1])
    grpo = run.config.grpo
    validated = ["validation/reward"] if grpo.val_period > 0 or grpo.val_at_end else []
    run.checkpoints.save(run.step, run.policy, state, tensors, reported=[*run.signals.metrics, *validated])
    run.reporter.event("checkpoint", step=run.step, seconds=time.perf_counter() - started)


def refuse_to_go_on(run: GrpoRun, record: StepRecord, saved: bool) -> None:
    """End the run where a signal says so, or another step would be over too late; called once a step is over."""
    signal = record.stopped_by
    if signal is not None and run.step < run.total_steps:
        raise EngineError(
            f"{signal.name} at step {run.step}: {signal.message}",
            where=f"signals.stop_on=[{','.join(run.config.signals.stop_on)}]",
            expected=f"{run.total_steps} steps",
            found=f"{run.step} trained" + (" and saved: --resume goes on from there" if saved else ""),
        )
    if saved and run.step < run.total_steps:
        run.checkpoints.refuse_overtime(run.step, run.total_steps, run.reporter)


def validation_due(run: GrpoRun) -> bool:
    """Whether the step just trained is followed by a validation."""
    grpo = run.config.grpo
    last = run.step >= run.total_steps
    periodic = grpo.val_period > 0 and run.step % grpo.val_period == 0 and run.step >= grpo.val_start_at
    return periodic or (last and grpo.val_at_end)


async def validate(run: GrpoRun) -> dict[str, float]:
    """Metrics of the current policy on validation prompts, a whole group each (some environments judge groups)."""
    grpo = run.config.grpo
    rows = list(run.validation)[: grpo.max_val_samples]
    groups = await run.collector.collect(
        rows,
        group_ids=[f"validation/{run.step}/{i}" for i in range(len(rows))],
        num_generations=grpo.num_val_generations_per_prompt or grpo.num_generations_per_prompt,
    )
    result = summarize(reward_brevity(rows, groups, grpo.low_effort))
    run.validated = {step: first for step, first in run.validated.items() if step == 0} | {run.step: result}
    return result.metrics("validation")


async def evaluate_heldout(run: GrpoRun, rows: Sequence[PromptRow], label: str) -> EvaluationResult:
    """Grade the generator's current weights on held-out prompts with `heldout.environment`."""
    settings, collector = run.config.heldout, run.collector
    chosen = list(rows)[: settings.max_prompts]
    groups = await collector.collect(
        chosen,
        group_ids=[f"heldout/{label}/{i}" for i in range(len(chosen))],
        num_generations=settings.samples_per_prompt,
        environment=collector.environments.get(settings.environment) if settings.environment else None,
        params=replace(collector.params, temperature=settings.temperature),
    )
    return summarize(groups)
