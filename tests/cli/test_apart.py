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
def test_a_secret_without_its_sign_is_not_shown(cli, words, flags):
    for command in ("plan", "run"):
        for target in ("toy/train", "toy_all"):
            result = cli(command, target, *words, *flags)
            shown = result.out + result.err
            assert result.code == 2 and "canary" not in shown


@pytest.mark.parametrize("words", [("train.steps", "4"), ("train.steps: 4",), ("--train.steps", "4"), ("toy.trane",)])
def test_what_is_no_override_is_told_how_one_is_written(cli, words):
    result = cli("plan", "toy/train", *words)
    assert result.code == 2 and words[0] in result.err and "KEY=VALUE" in result.err


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
    assert "'***'" in cli("plan", "api_key:canary").err + cli("plan", "canary", "api_key", "canary").err
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
