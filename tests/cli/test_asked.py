"""A request is kept in a run's folder and printed as a command: both are read back as it was."""

from __future__ import annotations

import json
import shlex
from dataclasses import fields, replace

import pytest

from nemotron_steps.cli.asked import Asked, asked_from
from nemotron_steps.cli.parser import UsageError, build

EVERYTHING = Asked(
    targets=("sft", "rl"),
    overrides=("a.b=two words", "~c", "+d=[1,2]"),
    config="tiny",
    inputs={"policy": "m:v1", "rl.prompts": "a path"},
    profile="cluster",
    passthrough=("--flag", "x y"),
    first="sft",
    until="rl",
    over=("sft.seed=1,2", "rl.lr=3,4"),
    ignore_checks=("score", "train"),
)


def test_a_kept_request_is_read_back_whole_whichever_parts_it_has():
    assert Asked.from_dict(json.loads(json.dumps(EVERYTHING.to_dict()))) == EVERYTHING
    for part in fields(Asked):
        if part.name != "targets":
            alone = Asked(("rl",), **{part.name: getattr(EVERYTHING, part.name)})
            assert alone != Asked(("rl",))
            assert Asked.from_dict(json.loads(json.dumps(alone.to_dict()))) == alone


def test_the_printed_command_asks_for_the_same():
    words, _, passthrough = EVERYTHING.typed.partition(" -- ")
    assert tuple(shlex.split(passthrough)) == EVERYTHING.passthrough
    parsed, later = build("steps").parse_known_args(["run", *shlex.split(words)])
    parsed.words = [*parsed.words, *later]
    assert asked_from(parsed) == replace(EVERYTHING, passthrough=())


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["rl", "--input", "policy"], "PORT=REF"),
        (["rl", "--input", "=x"], "PORT=REF"),
        (["rl", "--input", "policy="], "PORT=REF"),
        (["rl", "--input", "policy=a", "--input", "policy=b"], "given twice"),
    ],
)
def test_a_request_that_says_too_little_or_too_much_is_refused(given, says):
    with pytest.raises(UsageError, match=says):
        asked_from(build("steps").parse_args(["run", *given]))


@pytest.mark.parametrize(
    "change",
    [
        {"targets": []},
        {"over": "x"},
        {"inputs": {"a": 1}},
        {"config": 1},
        {"until": []},
        {"overrides": [1]},
        {"inputs": ["a"]},
        {"passthrough": "x"},
    ],
)
def test_a_record_that_no_request_writes_is_told_by_its_field(change):
    with pytest.raises(ValueError, match=f"`{next(iter(change))}`"):
        Asked.from_dict({**EVERYTHING.to_dict(), **change})


def test_a_secret_is_hidden_in_whichever_part_it_stands_and_nothing_else_is():
    url = "https://someone:hunter2hunter2@host/v1"
    told = {"overrides": (f"a.url={url}",), "inputs": {"policy": url}, "over": (f"a.url={url},b",)}
    asked = replace(EVERYTHING, **told, passthrough=("--api-key", "hunter2hunter2"))
    shown = asked.redacted()
    for part in fields(Asked):
        text = repr(getattr(shown, part.name))
        assert "hunter2" not in text
        if "hunter2" not in repr(getattr(asked, part.name)):
            assert text == repr(getattr(EVERYTHING, part.name))
    assert list(shown.inputs) == ["policy"] and shown.passthrough[0] == "--api-key"


def test_a_request_of_a_profile_that_nobody_waits_for_names_it_too():
    assert asked_from(build("steps").parse_args(["run", "rl", "-b", "far"])).profile == "far"
