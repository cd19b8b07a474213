"""When both supervised loops save and check the time, in which order they serve rows, and how chats lie."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from nemotron_steps.config.schema.dpo import DpoConfig
from nemotron_steps.config.schema.sft import SftConfig
from nemotron_steps.engine.supervised.chat_tokens import ChatSequence
from nemotron_steps.engine.supervised.training import batch_of, finetune, optimize_preferences, shuffled_batches
from nemotron_steps.engine.types import TrainBatch
from tests.engine.supervised.test_dpo import random_pairs

EXAMPLES = random_pairs(16)
UNSEEN = random_pairs(5, 1)


class ScriptedPolicy:
    """Says something of every token, and learns nothing."""

    def __init__(self) -> None:
        self.trained: list[TrainBatch] = []

    def logprobs(self, batch: TrainBatch) -> torch.Tensor:
        return -(batch.input_ids % 7 + 1).float()

    def reference_logprobs(self, batch: TrainBatch) -> torch.Tensor:
        return -(batch.input_ids % 5 + 1).float()

    def train_step(self, batch: TrainBatch) -> dict[str, float]:
        self.trained.append(batch)
        return {"loss": float(len(self.trained)), "accuracy": 0.5}


class Noted:
    """Checkpoints and a reporter that note what they are told; every other step is to be saved."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.metrics_of: list[dict[str, float]] = []
        self.start: dict[str, float] = {}
        self.progressed: list[tuple[float, float | None]] = []

    def latest(self) -> None: ...

    def steps_begin(self) -> None: ...

    def check(self) -> None:
        self.calls.append("check")

    def due(self, step: int, last: bool) -> bool:
        return step % 2 == 0

    def save(self, step: int, policy: Any, state: dict[str, Any], *, reported: Sequence[str] = ()) -> None:
        self.calls.append(("save", step, state["metrics"]["loss"], sorted(reported)))

    def refuse_overtime(self, step: int, total: int, reporter: Any) -> None:
        self.calls.append(("overtime", step, total))

    def metrics(self, step: int, values: dict[str, float]) -> None:
        if step:
            self.metrics_of.append(dict(values))
        else:
            self.start = dict(values)

    def progress(self, description: str, completed: float, total: float | None = None) -> None:
        self.progressed.append((completed, total))


def run(loop: str, validation: Sequence[Any] = UNSEEN, **settings: Any) -> tuple[dict[str, Any], Noted, ScriptedPolicy]:
    settings = {"max_num_steps": 99, "max_num_epochs": 1, **settings}
    values = {loop: settings, "policy": {"train_global_batch_size": 4, "make_sequence_length_divisible_by": 16}}
    policy, noted = ScriptedPolicy(), Noted()
    told: Any = (noted, noted)
    if loop == "sft":
        chats, unseen = ([pair.chosen for pair in pairs] for pairs in (EXAMPLES, validation))
        summary = finetune(policy, chats, unseen, SftConfig.model_validate(values), *told)  # type: ignore[arg-type]
    else:
        config = DpoConfig.model_validate(values)
        summary = optimize_preferences(policy, EXAMPLES, validation, config, *told)  # type: ignore[arg-type]
    return summary, noted, policy


REPORTED = {
    "sft": ["validation_loss"],
    "dpo": ["validation/accuracy", "validation/loss", "validation/rewards_margin"],
}


@pytest.mark.parametrize("loop", REPORTED)
def test_a_failed_save_is_asked_for_after_each_step_and_time_after_each_save_but_the_last(loop: str) -> None:
    summary, noted, _ = run(loop)
    assert noted.calls == [
        *("check", "check", ("save", 2, 2.0, []), ("overtime", 2, 4)),
        *("check", "check", ("save", 4, 4.0, [])),
    ]
    assert summary["steps"] == 4  # an epoch, of 99 steps that were asked for
    assert (summary["train_loss_first_2_steps"], summary["train_loss_last_2_steps"]) == (1.5, 3.5)
    assert noted.progressed == [(step, 4) for step in range(1, 5)]


@pytest.mark.parametrize("loop", REPORTED)
def test_without_validation_rows_nothing_is_validated_however_often(loop: str) -> None:
    summary, noted, _ = run(loop, [], val_period=1)
    assert not any("validation" in name for each in (summary, noted.start, *noted.metrics_of) for name in each)


NUMBERS = range(11)


def drawn(batch_size: int = 3, *, epochs: int = 4, seed: int = 5, skip: int = 0) -> list[list[int]]:
    return list(shuffled_batches(NUMBERS, batch_size, epochs=epochs, seed=seed, skip=skip))


@pytest.mark.parametrize("skip", range(13))
def test_a_resumed_run_goes_on_where_the_unbroken_one_would(skip: int) -> None:
    assert drawn(skip=skip) == drawn()[skip:]


def test_chats_lie_left_in_rows_as_wide_as_the_longest_rounded_up() -> None:
    chats = [ChatSequence([5, 6, 7], [0, 1, 1]), ChatSequence([8, 9, 10, 11, 12], [0, 0, 1, 0, 1])]
    batch = batch_of(chats, divisible_by=4)
    assert batch.input_ids.tolist() == [[5, 6, 7, 0, 0, 0, 0, 0], [8, 9, 10, 11, 12, 0, 0, 0]]
    assert batch.token_mask.tolist() == [[0, 1, 1, 0, 0, 0, 0, 0], [0, 0, 1, 0, 1, 0, 0, 0]]
    assert (batch.lengths.tolist(), batch.sample_mask.tolist()) == ([3, 5], [1, 1])
    assert bool((batch.advantages == 1).all()) and batch.packed_row is None
    assert batch_of(chats, divisible_by=5).input_ids.shape == batch_of(chats).input_ids.shape == (2, 5)
    assert batch_of(chats[:1], pad_id=3, divisible_by=4).input_ids.tolist() == [[5, 6, 7, 3]]
