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


def test_what_differs_in_more_than_a_seed_has_a_row_named_by_its_value_and_the_difference_to_the_first() -> None:
    runs = [("0.1", "1", 1.0), ("0.1", "2", 3.0), ("1/3", "1", 7.0)]
    made = [
        Outcome(f"t-m_{at}-{seed}", {"x": {"before": 0, "after": x}}, "t", {"t.opt.lr": lr, "t.seed": seed})
        for at, (lr, seed, x) in enumerate(runs)
    ]
    table = {row: {"y": value} for row, value in (("t-m_0-1", 1.0), ("t-m_1-2", 2.0), ("t-m_2-1", 4.5))}
    tables = spread_tables([*made, Outcome("compare", {"sizes": table})])
    assert {title: {row: str(*cells.values()) for row, cells in rows.items()} for title, rows in tables.items()} == {
        "over t.opt.lr and t.seed": {"lr=0.1": "2 ± 1.414", "lr=1/3": "7 (+5)"},
        "compare: sizes": {"t lr=0.1": "1.5 ± 0.7071", "t lr=1/3": "4.5 (+3)"},
    }
    lower = Outcome("t-c", {"x": {"before": 0, "after": 1.5, "standard_error": {"after": 0.4}}}, "t", {"lr": "c"})
    first = Outcome("t-b", {"x": {"before": 0, "after": 1.0, "standard_error": {"after": 0.3}}}, "t", {"lr": "b"})
    ((_, rows),) = spread_tables([first, lower]).items()
    assert str(rows["lr=c"]["x"]) == "1.5 (+0.5 ± 0.5)"
