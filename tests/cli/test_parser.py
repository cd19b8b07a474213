"""What the command line is taken to say: defaults, what has to be named, and what is handed on."""

from __future__ import annotations

import pytest

from nemotron_steps.cli.main import _unknown_flag
from nemotron_steps.cli.parser import build, refuse_flags_first, split_passthrough


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


@pytest.mark.parametrize("first", ["-h", "--help", "--version"])
def test_what_is_asked_of_the_program_itself_may_stand_first(first):
    refuse_flags_first(build("steps"), [first, "run"])


def test_a_misspelt_flag_with_a_value_is_named_without_it():
    error = _unknown_flag("--confg=tiny", build("steps").parse_args(["plan", "toy/make"]), "steps")
    assert "'--confg'" in error.what and error.hints[0].startswith("did you mean '--config'")
    error = _unknown_flag("--quite-another", build("steps").parse_args(["types"]), "steps")
    assert error.hints == ("steps types --help",)
