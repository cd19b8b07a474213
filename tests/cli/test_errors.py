"""Errors as text, JSON and exit codes; the terminal that they are written to."""

from __future__ import annotations

import errno
import io
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemotron_steps.cli.errors import render, report
from nemotron_steps.cli.main import _guarded
from nemotron_steps.cli.terminal import Terminal, duration, first_sentence, number, shorten, visible_width
from nemotron_steps.errors import ConfigError, JudgeUnavailableError, PlanError, StepFailedError, UnknownNameError
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


def test_one_problem_is_shown_alone_and_several_are_counted():
    one = PlanError("cannot plan: 1 problem", problems=(UnknownNameError("no step 'x'"),))
    assert _rendered(one) == "error[E110]: no step 'x'\n"
    two = PlanError("cannot plan: 2 problems", problems=(UnknownNameError("no step 'x'"), ConfigError("bad")))
    assert _rendered(two).splitlines()[0] == "error[E110]: no step 'x'"
    assert _rendered(two).splitlines()[-1] == "error[E300]: cannot plan: 2 problems"


def test_exit_codes(capsys):
    assert report(StepFailedError("x"), as_json=False) == 1
    assert report(ConfigError("x"), as_json=False) == 2
    assert report(JudgeUnavailableError("x"), as_json=False) == 3
    assert report(KeyboardInterrupt(), as_json=False) == 130
    assert report(ValueError("x"), as_json=False) == 1
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("as_json", [False, True])
def test_no_field_of_an_error_shows_a_secret(as_json, capsys, monkeypatch):
    monkeypatch.setenv("SOME_SERVICE_API_KEY", "qwertyuiop123")
    said = "it has qwertyuiop123 in it"
    problem = ConfigError(said, where=said, expected=said, found=said, hints=(said,))
    for error in (problem, PlanError("two", problems=(problem, ConfigError(said))), ValueError(said)):
        report(error, as_json=as_json)
        captured = capsys.readouterr()
        assert "it has" in captured.out + captured.err and "qwertyuiop" not in captured.out + captured.err


def test_json_errors_are_json_on_stdout(capsys):
    report(PlanError("two", problems=(ConfigError("a", where="f:1"),)), as_json=True)
    captured = capsys.readouterr()
    assert json.loads(captured.out)["error"]["problems"][0]["where"] == "f:1"
    assert captured.err == ""
    report(ZeroDivisionError("oops"), as_json=True)
    assert json.loads(capsys.readouterr().out)["error"]["class"] == "ZeroDivisionError"


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


@pytest.mark.parametrize(("length", "shown"), [(80, "a" * 80), (81, "a" * 77 + "...")])
def test_a_name_that_is_too_long_for_a_file_is_shown_by_its_beginning(length, shown, capsys):
    assert report(OSError(errno.ENAMETOOLONG, "too long", "a" * length), as_json=True) == 2
    assert json.loads(capsys.readouterr().out)["error"]["found"] == shown


def _terminal(width: int | None = None, *, color: bool = False, unicode: bool = True) -> Terminal:
    return Terminal(io.StringIO(), color=color, width=width, unicode=unicode)


def _text(terminal: Terminal) -> str:
    assert isinstance(terminal.stream, io.StringIO)
    return terminal.stream.getvalue()


@given(st.text(max_size=60), st.integers(2, 40))
def test_shortened_text_fits_and_keeps_its_beginning(text, width):
    cut = shorten(text, width)
    assert visible_width(cut) <= max(width, 1)
    if visible_width(text) <= width:
        assert cut == text
    else:
        assert text.startswith(cut.removesuffix("…"))


def test_what_is_too_wide_for_its_column_goes_below_where_that_is_asked_for():
    terminal = _terminal(40)
    terminal.table([["a", "short"], ["b", "word " * 8]], below=4)
    assert _text(terminal).splitlines() == ["a  short", "b", "    " + ("word " * 8)]


def test_a_table_fits_the_terminal_and_a_pipe_gets_everything():
    rows = [["id", "long " * 20, "end"], ["longer-id", "short", "x"]]
    narrow = _terminal(40)
    narrow.table(rows, indent=2, flexible=1)
    assert all(visible_width(line) <= 40 for line in _text(narrow).splitlines())
    assert "…" in _text(narrow)
    pipe = _terminal(None)
    pipe.table(rows, indent=2, flexible=1)
    assert ("long " * 20).strip() in _text(pipe)
    columns = [line.index("end") if "end" in line else line.index("x") for line in _text(pipe).splitlines()]
    assert columns[0] == columns[1]


def test_colour_only_where_it_is_wanted(monkeypatch):
    assert _terminal().style("x", "bold") == "x"
    assert _terminal(color=True).style("x", "bold", "red") == "\x1b[1;31mx\x1b[0m"
    assert Terminal.of(io.StringIO()).color is False
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert Terminal.of(io.StringIO()).color is True
    with monkeypatch.context() as patch:
        patch.setenv("TERM", "dumb")
        assert Terminal.of(io.StringIO()).color is False
    monkeypatch.setenv("NO_COLOR", "")
    assert Terminal.of(io.StringIO()).color is False
    assert _terminal(color=True).style("", "bold") == _terminal(color=True).style("") == ""


def test_model_text_cannot_steer_the_terminal():
    assert printable("a\x1b[2Jb\x07\tc") == "a�[2Jb�\tc"


def test_numbers_and_durations():
    found = [duration(s) for s in (0.012, 3.25, 59.96, 65.6, 3599.6, 7199)]
    assert found == ["12 ms", "3.2 s", "1 min 00 s", "1 min 06 s", "1 h 00 min", "1 h 59 min"]
    found = [number(v) for v in (1024, 0.8125, 1e-5, True, 1e6, 999_999.0, -0.0005)]
    assert found == ["1,024", "0.8125", "0.00001", "True", "1e+06", "999999", "-0.0005"]
    found = [first_sentence(text) for text in ("Makes rows. They\nare.", "Is it? Yes.", "v1.2 is out. So", "")]
    assert found == ["Makes rows", "Is it?", "v1.2 is out", ""]
