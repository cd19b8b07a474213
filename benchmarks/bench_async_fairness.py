"""Who is trained, and how fast, when answers have a long tail: the asynchronous loop on a virtual clock.

    python -m benchmarks.bench_async_fairness [--steps 60] [--seed 0]      the last line is JSON

The loop, its buffer and a step's numbers are the real ones; sampling, training and weight updates only take their time.
An answer takes a lognormal time (median 120 s, sigma 0.8, at most 30 minutes), of which 0.7 of the log's deviation
belongs to the prompt: some prompts are hard, and always long. The generator is never short of slots. 32 prompts of 16
answers a step.

Printed for each age bound and training time: seconds a step takes; `least`, what they would be if the loop did nothing
but keep data order and age bound, with the same answers; in how many steps a rollout was late; how often the hardest
fifth of the prompts was trained on, against all that were offered; mean seconds of the answers trained on, against all.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import statistics
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.virtual_clock import VirtualLoop
from nemotron_steps.config.schema.rl import RlConfig
from nemotron_steps.engine.checkpoints import CheckpointManager
from nemotron_steps.engine.grpo.async_loop import train_async
from nemotron_steps.engine.grpo.loop import GrpoRun
from nemotron_steps.engine.rollouts.collector import STRAGGLED
from nemotron_steps.engine.rollouts.data import PromptRow, PromptStream
from nemotron_steps.engine.signals import SignalMonitor
from nemotron_steps.engine.types import Rollout, RolloutGroup, TrainBatch, WeightSyncReport

HARDNESS = 0.7


@dataclass(frozen=True)
class Workload:
    """What takes how long, and what comes of it."""

    prompts: int = 32
    answers: int = 16
    steps: int = 60
    age: int = 1
    train_s: float = 60.0
    save_s: float = 0.0
    """Of a checkpoint after every step; 0 for none."""
    slots: int | None = None
    """Answers that are sampled at a time; None for as many as there are."""
    median_s: float = 120.0
    sigma: float = 0.8
    longest_s: float = 1800.0
    without_signal: float = 0.0
    """Share of prompts whose rewards are all equal, with dynamic sampling."""
    deadline_s: float | None = None
    seed: int = 0

    def with_(self, **changes: Any) -> Workload:
        """The same but for some."""
        return replace(self, **changes)

    def hardness(self, position: int) -> float:
        """Of a prompt: standard normal."""
        return random.Random(f"{self.seed}/{position}").gauss(0, 1)

    def seconds(self, position: int, attempt: int) -> list[float]:
        """How long each answer of a group takes."""
        hard, chance = self.hardness(position), random.Random(f"{self.seed}/{position}.{attempt}")
        free = math.sqrt(1 - HARDNESS**2)
        deviations = (HARDNESS * hard + free * chance.gauss(0, 1) for _ in range(self.answers))
        return [min(self.longest_s, self.median_s * math.exp(self.sigma * d)) for d in deviations]

    def has_signal(self, position: int) -> bool:
        """Whether rewards of the prompt's group differ."""
        return random.Random(f"{self.seed}:{position}").random() >= self.without_signal


@dataclass
class Outcome:
    """What a run did."""

    step_s: float
    least_step_s: float
    waited_share: float
    longest_wait_s: float
    policy_lag_mean: float
    policy_lag_max: float
    offered: int
    trained: int
    cut: int
    dropped: int
    hardest_fifth: float
    """Share of the hardest fifth of all offered prompts that was trained on, over the share of all."""
    length: float
    """Mean seconds of the answers trained on, over those of all offered."""
    trained_at: list[list[int]] = field(repr=False)
    """Positions of each step."""


class _Sampling:
    """Collector, generator and sampler in one: answers take their time, and nothing else."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.weight_version = 0
        self.generated_tokens = 0
        self.max_total_length = 0
        self._slots = asyncio.Semaphore(workload.slots) if workload.slots else nullcontext()

    def environment_of(self, prompt: PromptRow) -> Any:
        return SimpleNamespace(name="virtual")

    def shown(self, rollout: Rollout) -> dict[str, str]:
        return {"prompt": "", "response": ""}

    async def _answer(self, seconds: float) -> None:
        async with self._slots:
            await asyncio.sleep(seconds)

    def update_weights(self, weights: Iterable[Any], version: int) -> WeightSyncReport:
        self.weight_version = version
        return WeightSyncReport(version, 0.0, 0)

    async def collect(
        self, prompts: Sequence[PromptRow], *, group_ids: Sequence[str], deadline_s: float | None, **_: Any
    ) -> list[RolloutGroup]:
        (group_id,), began = group_ids, self.weight_version
        position, attempt = map(int, group_id.split("."))
        answers = [asyncio.ensure_future(self._answer(s)) for s in self.workload.seconds(position, attempt)]
        finished, late = await asyncio.wait(answers, timeout=deadline_s)
        for task in late:
            task.cancel()
        signal = self.workload.has_signal(position)
        rollouts = [
            Rollout(group_id, i, [1, 2, 3], [0, 1, 1], [0.0, -0.1, -0.1], [began, self.weight_version],
                    float(signal and i % 2), "virtual", False, metadata={"turn_texts": [""]},
                    failure=None if answer in finished else STRAGGLED)
            for i, answer in enumerate(answers)
        ]  # fmt: skip
        return [RolloutGroup(group_id, prompts[0].index, rollouts, began)]


class _Policy:
    """Training and saving take their time."""

    def __init__(self, workload: Workload, spend: Callable[[float], None]) -> None:
        self._workload, self._spend = workload, spend

    def logprobs(self, batch: TrainBatch) -> torch.Tensor:
        return batch.generation_logprobs.clone()

    def train_step(self, batch: TrainBatch) -> dict[str, float]:
        self._spend(self._workload.train_s)
        return {"loss": 0.0}

    def save_checkpoint(self, path: str) -> None:
        self._spend(self._workload.save_s)

    def weights(self) -> Iterable[Any]:
        return ()


class Reports:
    """Keeps what the fairness is computed from."""

    def __init__(self) -> None:
        self.metrics_of: list[dict[str, float]] = []
        self.trained: list[list[tuple[int, int]]] = []
        self.events: list[tuple[str, dict[str, Any]]] = []

    def metrics(self, step: int, values: Mapping[str, Any]) -> None:
        self.metrics_of.append(dict(values))

    def groups(self, step: int, groups: Sequence[Mapping[str, Any]]) -> None:
        self.trained.append([(g["position"], g["attempt"]) for g in groups if g["outcome"] == "trained"])

    def event(self, name: str, **fields: Any) -> None:
        self.events.append((name, fields))

    def sample(self, sample: Mapping[str, Any]) -> None: ...

    def signal(self, name: str, **numbers: Any) -> None: ...

    def progress(self, description: str, completed: float, total: float | None = None) -> None: ...


def simulate(workload: Workload, reports: Reports | None = None) -> Outcome:
    """Run the asynchronous loop to its end."""
    reports = reports or Reports()
    batch = workload.prompts * workload.answers
    config = RlConfig.model_validate(
        {
            "grpo": {
                "num_prompts_per_step": workload.prompts,
                "num_generations_per_prompt": workload.answers,
                "max_num_steps": workload.steps,
                "use_dynamic_sampling": workload.without_signal > 0,
                "async_grpo": {
                    "enabled": True,
                    "max_trajectory_age_steps": workload.age,
                    "straggler_deadline_s": workload.deadline_s,
                },
            },
            "loss_fn": {"use_importance_sampling_correction": True},
            "policy": {"train_global_batch_size": batch},
            "checkpointing": {"enabled": workload.save_s > 0, "save_period": 1, "keep_top_k": 1},
        }
    )
    needed = round(workload.prompts * (workload.steps + workload.age + 1) / (1 - workload.without_signal) * 1.2)
    rows = [PromptRow(i, {}, f"virtual:{i}") for i in range(needed)]
    prompts = PromptStream(rows, batch_size=workload.prompts, max_epochs=1, seed=0, shuffle=False)
    sampling = _Sampling(workload)
    with (
        tempfile.TemporaryDirectory() as folder,
        asyncio.Runner(loop_factory=VirtualLoop) as runner,
    ):
        loop: VirtualLoop = runner.get_loop()  # type: ignore[assignment]
        # What the loop asks of each part is all that these parts have.
        run = GrpoRun(
            config=config,
            policy=_Policy(workload, loop.spend),  # type: ignore[arg-type]
            generator=sampling,  # type: ignore[arg-type]
            sampler=sampling,  # type: ignore[arg-type]
            collector=sampling,  # type: ignore[arg-type]
            judges=[],
            prompts=prompts,
            validation=[],
            checkpoints=CheckpointManager(Path(folder), config.checkpointing),
            reporter=reports,
            signals=SignalMonitor(max_policy_lag=workload.age),
        )
        train_async(run, runner)
        wall = loop.time()
    return _outcome(workload, reports, wall)


def _outcome(workload: Workload, reports: Reports, wall: float) -> Outcome:
    last = reports.metrics_of[-1]
    issued = int(last["async/issued"] - sum(v for k, v in last.items() if k.startswith("async/withdrawn_")))
    issued += int(last.get("async/dropped", 0))
    offered = [p for p in range(issued) if workload.has_signal(p)]
    taken = {position for groups in reports.trained for position, _ in groups}
    by_hardness = sorted(offered, key=workload.hardness)
    hardest = by_hardness[-len(by_hardness) // 5 :]
    seconds = [s for groups in reports.trained for p, a in groups for s in workload.seconds(p, a)]
    everything = [s for p in offered for s in workload.seconds(p, 0)]

    def share(positions: Sequence[int]) -> float:
        return sum(p in taken for p in positions) / len(positions)

    return Outcome(
        step_s=wall / workload.steps,
        least_step_s=_least(workload, [[p for p, _ in groups] for groups in reports.trained]) / workload.steps,
        waited_share=sum(m["async/waited_s"] for m in reports.metrics_of) / wall,
        longest_wait_s=max(m["async/waited_s"] for m in reports.metrics_of),
        policy_lag_mean=statistics.fmean(m["policy_lag/mean"] for m in reports.metrics_of),
        policy_lag_max=max(m["policy_lag/max"] for m in reports.metrics_of),
        offered=len(offered),
        trained=len(taken),
        cut=sum(m.get("failures/straggler", 0.0) > 0 for m in reports.metrics_of),
        dropped=int(last.get("async/dropped", 0)),
        hardest_fifth=share(hardest) / share(offered),
        length=statistics.fmean(seconds) / statistics.fmean(everything),
        trained_at=[[p for p, _ in groups] for groups in reports.trained],
    )


def _least(workload: Workload, steps: Sequence[Sequence[int]]) -> float:
    """Seconds of a run that trains these groups: each is sampled as soon as its age allows, and each step waits."""
    updated = [0.0]
    for number, positions in enumerate(steps):
        begun = updated[max(0, number - workload.age)]
        sampled = begun + max(s for p in positions for s in workload.seconds(p, 0))
        updated.append(max(updated[-1], sampled) + workload.train_s)
    return updated[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    results = []
    workloads = [
        Workload(steps=arguments.steps, seed=arguments.seed, age=age, train_s=train_s)
        for age in (1, 2, 4)
        for train_s in (30.0, 120.0, 600.0)
    ]
    workloads.append(Workload(steps=arguments.steps, seed=arguments.seed, without_signal=0.5))
    for workload in workloads:
        outcome = simulate(workload)
        result = {
            "age": workload.age,
            "train_s": workload.train_s,
            "without_signal": workload.without_signal,
            **{k: v for k, v in vars(outcome).items() if k != "trained_at"},
        }
        results.append(result)
        print(
            f"age {workload.age}, training {workload.train_s:.0f} s, without signal {workload.without_signal:.0%}: "
            f"{outcome.step_s:.0f} s a step (least {outcome.least_step_s:.0f}), waiting {outcome.waited_share:.0%}, "
            f"lag {outcome.policy_lag_mean:.2f} (most {outcome.policy_lag_max:.0f}), "
            f"{outcome.cut} cut, {outcome.dropped} dropped, {outcome.trained} of {outcome.offered} trained, "
            f"hardest fifth {outcome.hardest_fifth:.1%}, length {outcome.length - 1:+.1%}",
            flush=True,
        )
    print(json.dumps({"benchmark": "async_fairness", "results": results}))


if __name__ == "__main__":
    main()
