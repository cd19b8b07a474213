"""Errors as text, JSON and exit codes; the terminal that they are written to."""

import io

import pytest

from nemotron_steps.cli.errors import render, report
from nemotron_steps.cli.main import _guarded
from nemotron_steps.cli.terminal import Terminal
from nemotron_steps.errors import ConfigError, PlanError
from nemotron_steps.session.jobs import printable


def _rendered(error) -> str:
    terminal = Terminal(io.StringIO(), color=False, width=None)
    render(error, terminal)
    return terminal.stream.getvalue()


def test_an_error_has_code_place_expectation_and_hints():
    error = ConfigError("unknown key 'a'", where="f.yaml:3", expected="b", found="a", hints=("b=1",))
    assert _rendered(error) == (
        "error[E200]: unknown key 'a'\n  --> f.yaml:3\n  expected: b\n  found:    a\n  hint: b=1\n"
    )


@pytest.mark.parametrize("as_json", [False, True])
def test_no_field_of_an_error_shows_a_secret(as_json, capsys, monkeypatch):
    monkeypatch.setenv("SOME_SERVICE_API_KEY", "qwertyuiop123")
    said = "it has qwertyuiop123 in it"
    problem = ConfigError(said, where=said, expected=said, found=said, hints=(said,))
    for error in (problem, PlanError("two", problems=(problem, ConfigError(said))), ValueError(said)):
        report(error, as_json=as_json)
        captured = capsys.readouterr()
        assert "it has" in captured.out + captured.err and "qwertyuiop" not in captured.out + captured.err


def test_an_unexpected_exception_says_where_and_keeps_secrets(capsys, monkeypatch):
    monkeypatch.setenv("SOME_TOKEN", "tok-abcdefgh")

    def fail() -> int:
        raise RuntimeError("broke with tok-abcdefgh \x1b[2J")

    assert _guarded(fail, [], as_json=False) == 1
    err = capsys.readouterr().err
    assert "internal error" in err
    assert "test_errors.py" in err
    assert "tok-abcdefgh" not in err
    assert "\x1b" not in err


def test_model_text_cannot_steer_the_terminal():
    assert printable("a\x1b[2Jb\x07\tc") == "a�[2Jb�\tc"
