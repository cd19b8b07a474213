"""Mean and spread over seeds: what is averaged with what, and what is not."""

import json
import math

import pytest

from nemotron_steps.runs.report.seed_stats import Outcome, spread_tables


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


def test_what_differs_in_more_than_a_seed_has_a_row_of_its_own() -> None:
    runs = [("a", "1"), ("a", "2"), ("b", "1")]
    made = [
        Outcome(f"t-{model}-{seed}", {"x": 1.0}, "t", {"train.model": model, "train.seed": seed})
        for model, seed in runs
    ]
    ((title, table),) = spread_tables(made).items()
    assert title == "over train.model and train.seed" and list(table) == ["t-a", "t-b"]
    assert (str(table["t-a"]["x"]), str(table["t-b"]["x"])) == ("1 ± 0", "1")
