import math
from itertools import pairwise

import pytest

from nemotron_steps.config.schema.policy import OptimizerConfig, SchedulerConfig
from nemotron_steps.engine.schedules import cosine, learning_rate, progress, sequence_length


def test_warm_up_then_constant_as_the_recipes_run() -> None:
    optimizer, scheduler = OptimizerConfig(lr=3e-6), SchedulerConfig(lr_warmup_iters=10)
    rates = [learning_rate(step, optimizer, scheduler) for step in range(14)]
    assert rates[:10] == pytest.approx([3e-7 * k for k in range(1, 11)])
    assert rates[9:] == [3e-6] * 5


@pytest.mark.parametrize("style", ["linear", "cosine"])
def test_decay_ends_at_the_minimum_and_stays_there(style: str) -> None:
    optimizer = OptimizerConfig(lr=1.0, min_lr=0.1)
    scheduler = SchedulerConfig(lr_warmup_iters=2, lr_decay_style=style, lr_decay_iters=12)  # type: ignore[arg-type]
    rates = [learning_rate(step, optimizer, scheduler) for step in range(20)]
    assert rates[1] == rates[2] == 1.0
    assert rates[7] == pytest.approx(0.55)
    assert rates[4] == pytest.approx({"linear": 0.82, "cosine": 0.55 + 0.45 * math.cos(0.2 * math.pi)}[style])
    assert rates[12:] == pytest.approx([0.1] * 8)
    assert all(a >= b for a, b in pairwise(rates[2:]))


def test_lengths_grow_to_the_end_of_the_run() -> None:
    lengths = [sequence_length(step, 101, 49_152, 65_536, multiple=64) for step in range(101)]
    assert (lengths[0], lengths[50], lengths[-1]) == (49_152, 57_344, 65_536)
    assert all(a <= b for a, b in pairwise(lengths))
    assert all(length % 64 == 0 for length in lengths)
    assert sequence_length(7, 10, 4096, None) == 4096


def test_epsilon_filtering_anneals_to_four_percent_on_a_cosine() -> None:
    limits = [cosine(1.0, 0.04, progress(step, 11)) for step in range(11)]
    assert limits[0] == 1.0 and limits[-1] == pytest.approx(0.04) and limits[5] == pytest.approx(0.52)
    assert limits[0] - limits[1] < limits[4] - limits[5]  # flat at the ends
