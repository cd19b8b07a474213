"""Mean and spread over seeds, one of which diverged."""

from __future__ import annotations

import json
import math

import pytest

from nemotron_steps.runs.spread import Outcome, spread_tables


@pytest.mark.parametrize("reward", [math.nan, "nan", math.inf, "inf", "-inf"])  # as reported, and as records have it
def test_an_instance_that_diverged_is_not_left_out_of_the_mean(reward: object) -> None:
    rewards = {"7": 0.5, "8": reward, "9": 0.7}
    outcomes = [
        Outcome(f"train-{seed}", {"reward": {"before": 0.1, "after": value}, "loss": 1.0}, "train", {"seed": seed})
        for seed, value in rewards.items()
    ]
    measures = spread_tables(outcomes)["over seed"]["train"]
    cell = measures["reward"]
    assert math.isnan(cell.mean) and cell.spread is None and str(cell) == "nan"
    assert list(cell.values) == ["train-7", "train-8", "train-9"]
    as_json = json.loads(json.dumps(cell.to_dict(), allow_nan=False))
    assert as_json["mean"] == "nan" and as_json["values"]["train-8"] == str(reward)
    assert str(measures["loss"]) == "1 ± 0"
