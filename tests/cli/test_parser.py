"""The command line, and the request that it becomes."""

import json
import shlex
from dataclasses import fields, replace

import pytest

from nemotron_steps.cli.errors import called
from nemotron_steps.cli.parser import build, refuse_flags_first, request_of
from nemotron_steps.session.run_request import RunRequest, UsageError


@pytest.mark.parametrize("first", ["-h", "--help", "--version"])
def test_what_is_asked_of_the_program_itself_may_stand_first(first):
    refuse_flags_first(build("steps"), [first, "run"])


EVERYTHING = RunRequest(
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
    name="nightly-1",
)


def test_a_kept_request_is_read_back_whole_whichever_parts_it_has():
    assert RunRequest.from_dict(json.loads(json.dumps(EVERYTHING.to_dict()))) == EVERYTHING
    for part in fields(RunRequest):
        if part.name != "targets":
            alone = RunRequest(("rl",), **{part.name: getattr(EVERYTHING, part.name)})
            assert alone != RunRequest(("rl",))
            assert RunRequest.from_dict(json.loads(json.dumps(alone.to_dict()))) == alone


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["rl", "--input", "policy"], "PORT=REF"),
        (["rl", "--input", "=x"], "PORT=REF"),
        (["rl", "--input", "policy="], "PORT=REF"),
        (["rl", "--input", "policy=a", "--input", "policy=b"], "given twice"),
        *(
            (["rl", f"--name={name}"], "cannot name a run")
            for name in ("", "a b", "-x", "a/b", "latest", "a" * 65, "x\n", "sk-proj-0123456789abcdefghijklmn")
        ),
    ],
)
def test_a_request_that_says_too_little_or_too_much_is_refused(given, says):
    with pytest.raises(UsageError, match=says):
        request_of(build("steps").parse_args(["run", *given]))


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
    with pytest.raises(ValueError, match=next(iter(change))):
        RunRequest.from_dict({**EVERYTHING.to_dict(), **change})


def test_a_secret_is_hidden_in_whichever_part_it_stands_and_nothing_else_is():
    url = "https://someone:hunter2hunter2@host/v1"
    told = {"overrides": (f"a.url={url}",), "inputs": {"policy": url}, "over": (f"a.url={url},b",)}
    asked = replace(EVERYTHING, **told, passthrough=("--api-key", "hunter2hunter2"))
    shown = asked.redacted()
    for part in fields(RunRequest):
        text = repr(getattr(shown, part.name))
        assert "hunter2" not in text
        if "hunter2" not in repr(getattr(asked, part.name)):
            assert text == repr(getattr(EVERYTHING, part.name))
    assert list(shown.inputs) == ["policy"] and shown.passthrough[0] == "--api-key"


@pytest.mark.parametrize(
    ("prog", "words", "hint", "shown"),
    [
        ("steps", "run S --home /my h", "steps status R", "steps status R --home /my"),
        ("steps", "run S --home=/h", "steps run A --force   # anew", "steps run A --force --home /h   # anew"),
        ("steps", "run S --home /h", "steps show S", "steps show S"),
        ("nemotron", "super3 rl rlvr", "steps logs R", "nemotron steps logs R"),
        ("steps", "run S -b P", "steps run A -c tiny", "steps run A -c tiny -b P"),
    ],
)
def test_a_command_is_shown_as_it_is_called_here(prog, words, hint, shown, monkeypatch):
    monkeypatch.setattr("nemotron_steps.cli.errors._typed", [prog, *shlex.split(words)])
    assert called(hint) == shown
    monkeypatch.setenv("UV_RUN_RECURSION_DEPTH", "1")
    assert called(hint) == f"uv run {shown}"


LONG = "a" * 300


@pytest.mark.parametrize(
    "command",
    [
        ("artifacts", "add", LONG),
        ("plan", "toy/train", "--input", f"rows={LONG}"),
        ("run", "--resume", LONG),
    ],
    ids=lambda command: " ".join(command).replace(LONG, "LONG"),
)
def test_a_long_name_is_refused_without_a_traceback(cli, command):
    result = cli(*command)
    assert result.code == 2
    assert "Traceback" not in result.err and "internal error" not in result.err
