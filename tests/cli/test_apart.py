"""Overrides without a `=` where it belongs: what is said of them, and that no secret is."""

from __future__ import annotations

import pytest

SECRETS = (
    ("judge.api_key", "canary"),
    ("judge.api_key:", "canary"),
    ("judge.api_key=", "canary"),
    ("judge.api_key", "=canary"),
    ("judge.api_key", "=", "canary"),
    ("judge.api_key:canary",),
    ("judge.api_key: canary horse",),
    ("judge.api_key canary",),
    ("+judge.api_key", "canary"),
    ("~judge.api_key", "canary"),
    ("--judge.api_key", "canary"),
    ("--judge.api_key=canary",),
    ("--api-key", "canary"),
    ("--api-kye=canary",),
    ("api_key", "canary"),
    ("token:canary",),
    ("hf_tokn", "canary"),
    ("judge.api_key", "canary=="),
    ("judge.api_key", "canary="),
    ("judge.api_key", "==", "canary"),
    ("toy/train.judge.api_key", "canary"),
    ("judge/api_key", "canary"),
    ("judge..api_key", "canary"),
)


@pytest.mark.parametrize("flags", [(), ("--json",)])
@pytest.mark.parametrize("words", SECRETS, ids=" ".join)
def test_a_secret_without_its_sign_is_not_shown_and_an_override_was_meant(cli, words, flags):
    for command in ("plan", "run"):
        for target in ("toy/train", "toy_all"):
            result = cli(command, target, *words, *flags)
            shown = result.out + result.err
            assert result.code == 2 and "canary" not in shown
            assert "KEY=VALUE" in shown and "=***'" in shown


@pytest.mark.parametrize(
    "words",
    [
        ("train.steps", "4"),
        ("train.steps:", "4"),
        ("train.steps=", "4"),
        ("train.steps", "=4"),
        ("train.steps", "=", "4"),
        ("train.steps:4",),
        ("train.steps: 4",),
        ("--train.steps", "4"),
        ("--train.steps=4",),
    ],
    ids=" ".join,
)
def test_an_override_without_its_sign_is_one_error_with_the_command_that_was_meant(cli, words):
    error = cli("plan", "toy/train", *words, "lr=1", "--json").json["error"]
    assert error["code"] == "E120" and "problems" not in error
    assert error["hints"][0] == "steps plan toy/train train.steps=4 lr=1 --json"


@pytest.mark.parametrize("words", [("toy.train", "toy/make_file"), ("toy/trane", "toy/make_file"), ("toy.trane",)])
def test_a_step_that_is_mistyped_is_no_override(cli, words):
    result = cli("plan", *words)
    assert result.code == 2 and f"there is no step '{words[0]}'" in result.err


@pytest.mark.parametrize(
    "command",
    [
        "show api_key canary",
        "explain api_key canary",
        "env serve equivalence api_key canary",
        "env serve equivalence_llm_judge api_key= canary",
        "plan toy/train api_key canary --dryrun",
        "run toy/train --dryrun api_key canary",
        "run toy/train --no-such -- api_key canary",
        "artifacts show api_key canary",
    ],
)
def test_the_value_of_a_secret_key_is_in_no_error_of_any_command(cli, command):
    result = cli(*command.split())
    assert result.code == 2 and result.err.startswith("error[")
    assert "canary" not in result.out + result.err


def test_a_word_that_is_masked_in_one_error_is_shown_in_the_next(cli):
    assert "api_key ***" in cli("plan", "toy/train", "api_key", "canary", "--dryrun").err
    assert "canary" in cli("plan", "canary").err


@pytest.mark.parametrize(
    "words",
    [
        ("judge.api_key", "--seed", "1", "canary"),
        ("judge.api_key", "--dry-run", "canary"),
        ("judge.api_key=", "--dry-run", "canary"),
        ("judge.api_key", "-canary"),
        ("judge.api_key", "--CANARY-canary"),
    ],
    ids=" ".join,
)
def test_a_secret_apart_from_its_key_by_flags_or_in_the_shape_of_one_is_not_shown(cli, words):
    result = cli("run", "toy/train", *words)
    assert result.code == 2 and result.err.startswith("error[")
    assert "canary" not in result.out + result.err


@pytest.mark.parametrize("after", ["train.steps=", "~train.steps", "toy/train.train.steps=4", "lr=", "~lr"])
def test_a_key_without_a_value_before_another_override_is_an_empty_value(cli, after):
    result = cli("plan", "toy/train", "train.note=", after)
    assert "are no override" not in result.err


def test_a_value_after_a_flag_is_not_the_flag(cli):
    result = cli("run", "toy/train", "train.steps", "--dry-run", "4")
    assert result.code == 2 and "train.steps=--dry-run" not in result.err
