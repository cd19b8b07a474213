"""What the command line is taken to say: defaults, what has to be named, and what is handed on."""

from __future__ import annotations

import pytest

from nemotron_steps.cli.main import _unknown_flag
from nemotron_steps.cli.parser import build, refuse_flags_first, split_passthrough
from nemotron_steps.session.run_request import UsageError


@pytest.mark.parametrize(
    ("words", "split"),
    [
        (["a", "--", "b", "--", "c"], (["a"], ["b", "--", "c"])),
        (["a", "--"], (["a"], [])),
        (["a"], (["a"], [])),
        ([], ([], [])),
    ],
)
def test_what_stands_after_the_first_two_dashes_is_handed_on(words, split):
    assert split_passthrough(words) == split


def test_what_no_flag_says_is_as_documented():
    parser = build("steps")
    serve = parser.parse_args(["env", "serve", "mcqa"])
    assert (serve.host, serve.port, serve.group_size, serve.model_url) == ("127.0.0.1", 0, None, None)
    assert parser.parse_args(["env", "verify", "mcqa", "r.jsonl"]).tolerance == 1e-6
    for command in ("status", "logs", "watch", "report"):
        assert parser.parse_args([command]).run == "latest"
    assert parser.parse_args(["report", "a", "b", "c"]).others == ["b", "c"]
    listed = parser.parse_args(["artifacts"])
    assert listed.handler == parser.parse_args(["artifacts", "list"]).handler
    assert (listed.type, listed.name, listed.home, listed.as_json) == (None, None, None, False)
    run = parser.parse_args(["run", "toy/make"])
    assert not (run.dry_run or run.force or run.force_squash or run.as_json)


@pytest.mark.parametrize("first", ["-h", "--help", "--version"])
def test_what_is_asked_of_the_program_itself_may_stand_first(first):
    refuse_flags_first(build("steps"), [first, "run"])


@pytest.mark.parametrize("flag", ["--home", "-c", "--config", "-r", "--run", "-b", "--batch", "--input", "--resume"])
def test_the_value_of_a_flag_that_stands_first_is_not_taken_for_the_command(flag):
    with pytest.raises(UsageError) as caught:
        refuse_flags_first(build("steps"), [flag, "plan", "run", "toy/make"])
    assert caught.value.hints == (f"steps run toy/make {flag} plan",)


def test_a_misspelt_flag_with_a_value_is_named_without_it():
    error = _unknown_flag("--confg=tiny", build("steps").parse_args(["plan", "toy/make"]), "steps")
    assert "'--confg'" in error.what and error.hints[0].startswith("did you mean '--config'")
    error = _unknown_flag("--quite-another", build("steps").parse_args(["types"]), "steps")
    assert error.hints == ("steps types --help",)
