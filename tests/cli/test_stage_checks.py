"""Checks of a stage's results that block what comes after it."""

from __future__ import annotations

import json

import pytest

from nemotron_steps.session.run_request import RunRequest
from nemotron_steps.session.session import Session

STAGES = """
[pipeline]
name = "gated"

[[stages]]
step = "toy/make"

[[stages]]
step = "toy/train"
config = "tiny"
inputs = {{ rows = "make" }}
{fan_out}
{checks}

[[stages]]
step = "toy/score"
inputs = {{ export = "train" }}
"""


@pytest.fixture
def gated(workplace):
    (workplace / "manifests").mkdir()

    def write(*checks: str, fan_out: str = "") -> None:
        text = "".join(f"[[stages.checks]]\n{check}\n" for check in checks)
        (workplace / "manifests" / "gated.toml").write_text(STAGES.format(checks=text, fan_out=fan_out))

    return write


def states(cli):
    steps = json.loads(cli("status", "--json").out)["steps"]
    return {key: step["state"] for key, step in steps.items()}


@pytest.mark.parametrize(
    "check",
    [
        'metric = "held_out_reward"\nat_least = 0.8',  # of the summary, after training: 0.75
        'metric = "held_out_reward/before"\nat_most = 0.2',
        'metric = "kl_penalty"\nat_most = 0.002',  # the last of the metrics: 0.003
    ],
)
def test_a_failed_check_ends_the_pipeline_there_and_keeps_what_is_committed(check, cli, gated):
    gated(check)
    blocked = cli("run", "gated")
    assert blocked.code == 1 and "error[E640]" in blocked.err
    assert {key: state for key, state in states(cli).items() if not key.startswith("toy")} == {
        "make": "ran",
        "train": "ran",
        "score": "pending",
    }
    assert cli("artifacts", "show", "toy/train/model:v1").code == 0


def test_the_error_says_what_where_and_how_to_go_on_and_pasting_the_hint_does(cli, gated):
    gated('metric = "held_out_reward"\nat_least = 0.8')
    error = json.loads(cli("run", "gated", "--json").out)["error"]
    assert error["where"] == "stage train: held_out_reward"
    assert (error["expected"], error["found"]) == ("at least 0.8", "0.75")
    (hint,) = [hint for hint in error["hints"] if "--ignore-checks" in hint]
    went_on = cli(*hint.partition("#")[0].split()[1:])
    assert went_on.code == 0 and "held_out_reward: 0.75, should be at least 0.8" in went_on.out
    assert states(cli)["score"] == "ran"


def test_a_cached_stage_is_checked_as_one_that_ran_whatever_run_made_it(cli, gated):
    gated()
    assert cli("run", "gated", "--until", "train").code == 0
    gated('metric = "kl_penalty"\nat_most = 0.002', fan_out='fan_out = { "steps" = [3] }')
    blocked = cli("run", "gated")
    assert blocked.code == 1 and states(cli)["train-3"] == "cached"
    gated('metric = "kl_penalty"\nat_most = 0.004')
    assert cli("run", "gated").code == 0


def test_a_resumed_run_is_checked_by_the_metrics_of_its_own_first_attempt(cli, gated):
    gated('metric = "kl_penalty"\nat_most = 0.002')
    assert cli("run", "gated").code == 1
    gated('metric = "kl_penalty"\nat_most = 0.004')
    assert cli("run", "--resume", "latest").code == 0
    assert (states(cli)["train"], states(cli)["score"]) == ("cached", "ran")


def test_a_warning_and_a_check_that_holds_block_nothing(cli, gated):
    gated('metric = "held_out_reward"\nat_least = 0.8\nseverity = "warn"', 'metric = "loss"\nat_most = 0.5')
    result = cli("run", "gated")
    assert result.code == 0
    assert (
        "check of train failed: held_out_reward: 0.75" in result.out and "check of train failed: loss" not in result.out
    )


def test_a_number_that_is_not_there_fails_its_check_and_near_ones_are_named(cli, gated):
    gated('metric = "held_out_rewards"\nat_least = 0.1')
    blocked = cli("run", "gated")
    assert blocked.code == 1 and "no such number (near: held_out_reward" in blocked.err


def test_an_instance_that_fails_its_check_blocks_only_what_reads_it(cli, gated):
    gated('metric = "seeded_reward"\nat_least = 0.5', fan_out="fan_out = { seed = [4, 6] }")
    assert cli("run", "gated").code == 1
    after = states(cli)
    assert (after["score-4"], after["score-6"]) == ("pending", "ran")
    assert cli("run", "gated", "--ignore-checks", "train").code == 0


def test_starting_from_a_later_stage_leaves_out_no_check_of_what_it_reads(cli, gated):
    gated('metric = "held_out_reward"\nat_least = 0.8')
    assert cli("run", "gated").code == 1
    blocked = cli("run", "gated", "--from", "score")
    assert blocked.code == 1 and "error[E640]" in blocked.err
    assert cli("run", "gated", "--from", "score", "--ignore-checks", "train").code == 0


def test_checks_of_one_instance_are_ignored_and_those_of_the_others_are_not(workplace, gated):
    gated('metric = "seeded_reward"\nat_least = 0.5', fan_out="fan_out = { seed = [4, 6] }")

    def severities(*ignored: str) -> dict[str, str]:
        request = Session().request(RunRequest(("gated",), ignore_checks=ignored))
        return {goal.name: check.severity for goal in request.goals for check in goal.checks}

    assert severities() == {"train-4": "block", "train-6": "block"}
    assert severities("train-4") == {"train-4": "warn", "train-6": "block"}
    assert severities("train", "score") == {"train-4": "warn", "train-6": "warn"}
