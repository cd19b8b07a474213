"""What `steps watch` makes of a run's records as they come."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nemotron_steps.runs.report.follow import Follower


def write(folder: Path, name: str, *records: dict[str, Any]) -> None:
    with (folder / f"{name}.jsonl").open("a") as file:
        file.writelines(json.dumps({"step": "rl", **record}) + "\n" for record in records)


def metrics(index: int, moment: float, **values: Any) -> dict[str, Any]:
    return {"kind": "metrics", "time": moment, "index": index, "values": values}


def test_a_new_attempt_has_no_signal_and_no_warning_of_the_one_before(tmp_path: Path) -> None:
    follower = Follower(tmp_path)
    signals = [{"kind": "signal", "time": 2.0, "step": step, "name": "kl_spike", "numbers": {}} for step in "ab"]
    write(tmp_path, "events", *signals, {"kind": "warning", "time": 2.0, "text": "look here"})
    follower.look()
    assert list(follower.warnings) == ["look here"] and list(follower.steps["a"].signals) == ["kl_spike"]
    write(tmp_path, "events", {"kind": "run_started", "time": 7.5, "step": ""})
    follower.look()
    assert (follower.started, list(follower.warnings)) == (7.5, [])
    assert [follower.steps[step].signals for step in "ab"] == [{}, {}]


def test_records_of_several_files_come_in_the_order_of_time_and_those_without_one_not_at_all(tmp_path: Path) -> None:
    write(tmp_path, "events", {"kind": "event", "time": 2.0}, {"kind": "event"}, {"time": 1.0}, {"kind": 5, "time": 0})
    write(tmp_path, "metrics", metrics(1, 1.0), metrics(2, 3.0))
    assert [record["time"] for record in Follower(tmp_path).look()] == [1.0, 2.0, 3.0]


def test_a_training_step_that_is_done_again_begins_the_pace_anew(tmp_path: Path) -> None:
    follower = Follower(tmp_path)
    write(tmp_path, "metrics", metrics(1, 10.0), metrics(2, 20.0))
    follower.look()
    assert follower.steps["rl"].seconds_per_step == 10.0
    write(tmp_path, "metrics", metrics(2, 500.0))
    follower.look()
    assert follower.steps["rl"].seconds_per_step is None
    write(tmp_path, "metrics", metrics(3, 503.0))
    follower.look()
    assert follower.steps["rl"].seconds_per_step == 3.0
