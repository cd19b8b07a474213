"""Both loops over parts that take no time: what they ask of each part, in which order, and what they tell of it."""

import asyncio
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from nemotron_steps.config.schema.rl import RlConfig
from nemotron_steps.engine.checkpoints import CheckpointManager
from nemotron_steps.engine.grpo.async_loop import train_async
from nemotron_steps.engine.grpo.loop import GrpoRun, train
from nemotron_steps.engine.rollouts.data import PromptRow, PromptStream
from nemotron_steps.engine.signals import SignalMonitor
from nemotron_steps.engine.types import RolloutGroup, WeightSyncReport
from nemotron_steps.errors import EngineError, RetryableError
from tests.engine.engine_samples import rollout

Graded = Callable[[int, int], Sequence[float | str]]
"""(row, how often it was asked for) → the reward of each rollout, or why it has none."""
BOTH = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])


def by_step(row: int, attempt: int) -> Sequence[float | str]:
    """Rewards whose mean is the step, two prompts each."""
    return (row // 2 - 0.5, row // 2 + 0.5)


class Parts:
    """Policy, generator, sampler, collector, judge and reporter in one; notes what they are asked and told."""

    def __init__(self, graded: Graded) -> None:
        self.graded = graded
        self.calls: list[str] = []
        self.collected: list[dict[str, Any]] = []
        self.batches: list[Any] = []
        self.asked: Counter[int] = Counter()
        self.metrics_of: list[dict[str, Any]] = []
        self.besides: list[dict[str, Any]] = []
        """Metrics that are no training step's: validation before the first."""
        self.told: list[dict[str, Any]] = []
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.weight_version = self.generated_tokens = self.max_total_length = 0
        self.training_s, self.training = 0.0, threading.Event()
        self.after_training_began = False
        """Whether what comes after the first prompts is sampled once a training step is at work."""

    # -- generator, sampler, collector
    def update_weights(self, weights: Any, version: int) -> WeightSyncReport:
        self.calls.append(f"weights {version}")
        self.weight_version = version
        return WeightSyncReport(version, 0.0, 8)

    def finish_generation(self) -> None:
        self.calls.append("finish")

    def shown(self, rollout: Any) -> dict[str, str]:
        return {"prompt": "", "response": ""}

    async def collect(self, prompts: Sequence[PromptRow], **asked: Any) -> list[RolloutGroup]:
        await asyncio.sleep(0)
        while self.after_training_began and prompts[0].index >= 2 and not self.training.is_set():
            await asyncio.sleep(0.001)
        self.calls.append("sample")
        self.collected.append({"prompts": [prompt.index for prompt in prompts], **asked})
        groups = []
        for prompt, group_id in zip(prompts, asked["group_ids"], strict=True):
            self.asked[prompt.index] += 1
            rollouts = [
                rollout(
                    group_id,
                    index,
                    reward=math.nan if isinstance(found, str) else found,
                    failure=found if isinstance(found, str) else None,
                    version=self.weight_version,
                )
                for index, found in enumerate(self.graded(prompt.index, self.asked[prompt.index]))
            ]
            groups.append(RolloutGroup(group_id, prompt.index, rollouts, self.weight_version))
        return groups

    # -- policy
    def logprobs(self, batch: Any) -> Any:
        return batch.generation_logprobs.clone()

    def train_step(self, batch: Any) -> dict[str, float]:
        self.training.set()
        time.sleep(self.training_s)
        self.calls.append("train")
        self.batches.append(batch)
        return {"loss": 0.0}

    def weights(self) -> Any:
        return ()

    def save_checkpoint(self, path: str) -> None:
        Path(path, "weights").touch()

    def load_checkpoint(self, path: str) -> None:
        assert Path(path, "weights").is_file()

    # -- judge, reporter
    def start_step(self, step: str) -> None:
        self.calls.append(f"judge {step}")

    def metrics(self, step: int, values: Any) -> None:
        (self.metrics_of if "reward/mean" in values else self.besides).append({"step": step, **values})

    def groups(self, step: int, groups: Any) -> None:
        self.told += [{"step": step, **group} for group in groups]

    def event(self, name: str, **fields: Any) -> None:
        self.events.append((name, fields))

    def ignored(self, *given: Any, **more: Any) -> None: ...

    sample = signal = progress = ignored


def instant(
    folder: Path,
    steps: int,
    graded: Graded = by_step,
    *,
    asynchronous: bool = False,
    validation: int = 0,
    checkpointing: dict[str, Any] | None = None,
    policy: dict[str, Any] | None = None,
    stop_on: tuple[str, ...] = (),
    **grpo: Any,
) -> tuple[GrpoRun, Any]:
    """A run of two prompts of two rollouts a step, in the order of the file, and its parts."""
    config = RlConfig.model_validate(
        {
            "grpo": {
                "num_prompts_per_step": 2,
                "num_generations_per_prompt": 2,
                "max_num_steps": steps,
                "async_grpo": {"enabled": asynchronous, "in_flight_weight_updates": False},
                **grpo,
            },
            "loss_fn": {"use_importance_sampling_correction": asynchronous},
            "policy": {"train_global_batch_size": 4, **(policy or {})},
            "checkpointing": {"save_period": 100, **(checkpointing or {})},
            "signals": {"stop_on": stop_on},
        }
    )
    rows = [PromptRow(index, {}, f"f:{index + 1}") for index in range(2 * steps + 10)]
    parts: Any = Parts(graded)
    run = GrpoRun(
        config=config,
        policy=parts,
        generator=parts,
        sampler=parts,
        collector=parts,
        judges=[parts, parts],
        prompts=PromptStream(rows, batch_size=2, max_epochs=1, seed=0, shuffle=False),
        validation=rows[:validation],
        checkpoints=CheckpointManager(folder, config.checkpointing),
        reporter=parts,
        signals=SignalMonitor(stop_on=stop_on),
    )
    return run, parts


def trained(run: GrpoRun) -> dict[str, Any]:
    return (train_async if run.config.grpo.async_grpo.enabled else train)(run)


@BOTH
def test_the_summary_of_a_resumed_run_is_of_all_its_steps_and_a_run_that_is_over_trains_no_further(
    asynchronous: bool, tmp_path: Path
) -> None:
    trained(instant(tmp_path, 6, asynchronous=asynchronous)[0])
    for _ in range(2):  # the last six steps, and then none
        run, parts = instant(tmp_path, 12, asynchronous=asynchronous)
        assert trained(run) == {"steps": 12, "reward_first_5_steps": 2.0, "reward_last_5_steps": 9.0}
        assert run.signals.state_dict()["history"]["reward/mean"][1] == [float(step) for step in range(12)]
    assert "train" not in parts.calls and parts.told == []


@BOTH
@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"val_at_start": True, "val_period": 2}, {"before": 0, "after": 4}),
        ({"val_at_start": True, "val_period": 3}, 3),  # not of the weights that the run ends with
        ({"val_at_end": True}, 4),
        ({}, None),
    ],
)
def test_before_is_what_the_first_weights_gave_and_after_what_the_last_ones_did(
    settings: dict[str, bool], told: Any, asynchronous: bool, tmp_path: Path
) -> None:
    """Each policy's answers are worth the steps it was trained for; the run is broken off after its second step."""
    for steps in (2, 4):
        run, parts = instant(tmp_path, steps, validation=2, asynchronous=asynchronous, **settings)
        parts.graded = lambda row, attempt, parts=parts: [float(parts.weight_version)] * 2
        summary = trained(run)
    start = [{"step": each["step"], "validation/reward": each["validation/reward"]} for each in parts.besides]
    assert start == ([{"step": 0, "validation/reward": 0.0}] if settings.get("val_at_start") else [])
    found = {name: value for name, value in summary.items() if name.startswith("validation_reward")}
    if isinstance(told, dict):
        both = {"standard_error": {"before": 0.0, "after": 0.0}, "samples": {"before": 4, "after": 4}}
        assert found == {"validation_reward": told | both}
    else:
        assert found == ({} if told is None else {f"validation_reward_step_{told}": told})


def silent_at_first(row: int, attempt: int) -> Sequence[float | str]:
    """The first prompt is graded at the second attempt, the second one at none."""
    if row == 1 or (row == 0 and attempt == 1):
        return ("judge_unavailable", "judge_unavailable")
    return (0.0, 1.0)


def test_attempts_at_a_prompt_have_names_of_their_own_and_count_among_the_failures_of_their_step(
    tmp_path: Path,
) -> None:
    run, parts = instant(tmp_path, 1, silent_at_first)
    train(run)
    ids = [group_id for each in parts.collected for group_id in each["group_ids"]]
    assert len(set(ids)) == len(ids) == 5 and [each["prompts"] for each in parts.collected] == [[0, 1], [0, 1], [1]]
    # One attempt at the first and two at the second beside what is trained, of which half has no verdict.
    assert parts.metrics_of[0]["failures/judge_unavailable"] == pytest.approx((2 + 4 + 2) / (6 + 4))
    assert parts.told == [
        {"step": 1, "prompt": 0, "attempt": 1, "outcome": "trained"},
        {"step": 1, "prompt": 1, "attempt": 2, "outcome": "ungraded"},
    ]


@pytest.mark.parametrize("dynamic", [False, True])
def test_asynchronously_what_nobody_can_grade_is_left_out_and_only_what_may_be_graded_is_tried_again(
    dynamic: bool, tmp_path: Path
) -> None:
    def graded(row: int, attempt: int) -> Sequence[float | str]:
        return ("prompt_too_long", "prompt_too_long") if row == 2 else silent_at_first(row + 1, attempt)

    run, parts = instant(tmp_path, 2, graded, asynchronous=True, use_dynamic_sampling=dynamic)
    trained(run)
    outcomes = {(group["prompt"], group["outcome"], group["attempt"]) for group in parts.told}
    assert {(2, "ungraded", 0), (0, "dropped", 2)} <= outcomes
    assert [group["prompt"] for group in parts.told if group["outcome"] == "trained"] == [1, 3, 4, 5]
    assert parts.metrics_of[-1]["async/discarded_ungraded"] == 1.0
    if dynamic:
        assert sum(metrics["dynamic_sampling/ungraded_groups"] for metrics in parts.metrics_of) == 3


@BOTH
@pytest.mark.parametrize("enabled", [True, False])
def test_a_signal_ends_the_run_that_is_to_stop_on_it_with_its_step_saved_and_resumed_it_goes_on(
    asynchronous: bool, enabled: bool, tmp_path: Path
) -> None:
    given: dict[str, Any] = {"asynchronous": asynchronous, "checkpointing": {"enabled": enabled}}
    given["stop_on"] = ("policy_collapse", "low_reward_variance")
    run, _ = instant(tmp_path, 8, lambda row, attempt: (1.0, 1.0), **given)
    with pytest.raises(EngineError, match="low_reward_variance at step 5: 100% of the prompt groups") as caught:
        trained(run)
    assert caught.value.found == ("5 trained and saved: --resume goes on from there" if enabled else "5 trained")
    assert [each.step for each in run.checkpoints.all()] == ([5] if enabled else [])
    if enabled:
        assert trained(instant(tmp_path, 8, lambda row, attempt: (1.0, 1.0), **given)[0])["steps"] == 8
    over = instant(tmp_path / "whole", 5, lambda row, attempt: (1.0, 1.0), **given)[0]
    assert trained(over)["steps"] == 5  # raised by the last step


def test_a_run_whose_last_step_is_saved_is_over_and_not_out_of_time(tmp_path: Path) -> None:
    late = {"checkpoint_must_save_by": "00:00"}
    run, _ = instant(tmp_path, 2, checkpointing=late)
    with pytest.raises(RetryableError):
        train(run)
    run, _ = instant(tmp_path, 2, checkpointing=late)
    assert train(run)["steps"] == 2


def test_what_fails_beside_a_training_step_is_raised_once_that_step_is_over(tmp_path: Path) -> None:
    """Its policy is closed next."""

    def graded(row: int, attempt: int) -> Sequence[float | str]:
        if row >= 2:
            raise MemoryError("generator")
        return (0.0, 1.0)

    run, parts = instant(tmp_path, 3, graded, asynchronous=True)
    parts.training_s, parts.after_training_began = 0.2, True
    with asyncio.Runner() as runner:
        with pytest.raises(MemoryError, match="generator"):
            train_async(run, runner)
        assert "train" in parts.calls
