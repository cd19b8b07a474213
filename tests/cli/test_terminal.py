from __future__ import annotations

import io

from hypothesis import given
from hypothesis import strategies as st

from nemotron_steps.cli.terminal import (
    Terminal,
    duration,
    first_sentence,
    number,
    printable,
    shorten,
    visible_width,
)


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


@given(st.lists(st.sampled_from(["a", "漢", "\x1b[31m", "\x1b[0m", "b "]), max_size=40), st.integers(2, 20))
def test_shortening_never_breaks_an_escape(pieces, width):
    cut = shorten("".join(pieces), width)
    assert "\x1b" not in cut.replace("\x1b[31m", "").replace("\x1b[0m", "")
    assert visible_width(cut) <= width


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
    assert [duration(s) for s in (0.012, 3.25, 65, 3700)] == ["12 ms", "3.2 s", "1 min 05 s", "1 h 01 min"]
    assert [duration(s) for s in (1, 60, 65.6, 3599.6, 7199)] == [
        *("1.0 s", "1 min 00 s", "1 min 06 s", "1 h 00 min", "1 h 59 min")
    ]
    assert [duration(s) for s in (0.9996, 59.94, 59.96)] == ["1.0 s", "59.9 s", "1 min 00 s"]
    assert [number(v) for v in (1024, 0.8125, 1e-5, True, "x", 0.0)] == [
        "1,024",
        "0.8125",
        "0.00001",
        "True",
        "x",
        "0",
    ]
    assert first_sentence("Makes rows. They\nare numbers.") == "Makes rows"
    assert [number(v) for v in (1e6, 999_999.0, -5e6, -0.0005, 0.001)] == [
        *("1e+06", "999999", "-5e+06", "-0.0005", "0.001")
    ]
    assert [first_sentence(text) for text in ("Is it? Yes.", "v1.2 is out. So", "")] == ["Is it?", "v1.2 is out", ""]


def test_what_a_stream_can_show_is_asked_of_it(monkeypatch):
    class Screen(io.StringIO):
        encoding = "ISO-8859-1"

        def isatty(self):
            return True

    monkeypatch.setenv("COLUMNS", "77")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    screen = Terminal.of(Screen())
    assert (screen.color, screen.width, screen.unicode) == (True, 77, False)
    pipe = Terminal.of(io.TextIOWrapper(io.BytesIO(), encoding="utf-8"))
    assert (pipe.color, pipe.width, pipe.unicode) == (False, None, True)
