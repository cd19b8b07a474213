"""What one runs into in the first hours: --force, a config file's name, flags before the command, logs as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from nemotron_steps.runs.follow import Tail
from tests.cli.conftest import Cli


def test_force_shows_what_will_run(cli: Cli) -> None:
    cli("run", "toy/train", "toy/score", "-c", "tiny")
    asked = ("toy/train", "-c", "tiny")
    cached = cli("plan", *asked, "--json").json["steps"]
    assert [step["cached"] is not None for step in cached] == [True, True]
    for command in (("plan", *asked), ("run", "-d", *asked)):
        forced = cli(*command, "--force", "--json").json["steps"]
        assert [step["cached"] is not None for step in forced] == [True, False]
    ran = cli("run", *asked, "--force")
    plan, _, rest = ran.out.partition("\n\n")
    assert "1 cached" in plan and "● " in plan and "1 ran, 1 cached" in rest
    # What reads a forced step's output is not known to be cached.
    chain = cli("plan", "toy/train", "toy/score", "-c", "tiny", "--force", "--json").json["steps"]
    assert {step["key"]: step["cached"] is not None for step in chain} == {
        "toy/make": True,
        "toy/train": False,
        "toy/convert": False,
        "toy/score": False,
    }


def test_a_name_is_a_file_where_no_step_has_a_config_of_that_name(cli: Cli, workplace: Path) -> None:
    (workplace / "mine.yaml").write_text("defaults: [tiny]\nsteps: 5\n")
    shown = cli("run", "toy/make", "toy/train", "-c", "mine", "-d")
    assert shown.code == 0, shown.err
    assert "-c ./mine.yaml" in shown.out
    (run,) = [cli("run", "toy/train", "-c", "mine", "--json").json["run"]]
    assert yaml.safe_load((workplace / "home/runs" / run / "config.yaml").read_text())["toy/train"]["steps"] == 5
    assert cli("plan", "toy/train", "-c", "mine", "--json").json["steps"][-1]["config"].endswith("mine.yaml")
    assert "has no config 'other'" in cli("plan", "toy/train", "-c", "other").err


def test_a_steps_own_config_is_not_replaced_by_a_file_and_that_is_said(cli: Cli, workplace: Path) -> None:
    (workplace / "tiny.yaml").write_text("steps: 5\n")
    shown = cli("run", "toy/train", "-c", "tiny", "-d", "--json").json
    assert shown["configs"]["toy/train"]["steps"] == 3
    assert shown["warnings"] == ["-c tiny is that of toy/train, not ./tiny.yaml"]


def test_a_line_that_is_still_being_written_is_shown_once_it_is_whole(tmp_path: Path) -> None:
    tail = Tail(tmp_path / "log.txt")
    assert tail.new() == []  # not there yet
    with tail.path.open("ab", buffering=0) as log:
        log.write(b"first\nsec")
        assert tail.new() == [b"first"] and tail.new() == []
        log.write(b"ond\nthird")
        assert tail.new() == [b"second"]
        log.write(b"\n")
        assert tail.new() == [b"third"] and tail.new() == []


def test_logs_as_json_are_events_and_metrics_in_order(cli: Cli) -> None:
    cli("run", "toy/train", "-c", "tiny")
    for command in (("logs", "--json"), ("logs", "-f", "--json")):
        records = [json.loads(line) for line in cli(*command).out.splitlines()]
        assert [record["time"] for record in records] == sorted(record["time"] for record in records)
        kinds = [record["kind"] for record in records]
        assert kinds[0] == "run_started" and kinds[-1] == "run_finished"
        assert [r["index"] for r in records if r["kind"] == "metrics"] == [1, 2, 3]
    assert json.loads(cli("logs", "nowhere", "--json").out)["error"]["code"] == "E110"
