from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from nemotron_steps.cli.live import BarDisplay, LineDisplay, Tolerant, bar_line, headline, open_display
from nemotron_steps.cli.terminal import Terminal, visible_width


def _lines(records) -> list[str]:
    terminal = Terminal(io.StringIO(), color=False, width=None)
    display = LineDisplay(terminal)
    for record in records:
        display({"time": time.time(), "step": "toy", **record})
    display.close()
    return [line.split(" ", 1)[1] for line in terminal.stream.getvalue().splitlines()]


def test_headline_picks_the_numbers_that_matter():
    values = {"reward/mean": 0.5, "loss": 1.25, "kl_penalty": 0.001, "timing/train_s": 3.0, "lr": 1e-3}
    assert headline(values) == "reward 0.5  loss 1.25  kl 0.001"
    assert headline({"other": 1.0}) == ""
    assert headline({"loss": 0.5, "kl_penalty": 0.0}) == "loss 0.5"


def test_lines_are_few_and_the_last_metrics_are_always_there():
    metrics = [{"kind": "metrics", "index": i, "values": {"loss": 1 / i}} for i in range(1, 200)]
    finished = {"kind": "step_finished", "outputs": {"m": "m:v1"}, "seconds": 2.0}
    lines = _lines([*metrics, finished])
    assert lines == ["[toy] step 1: loss 1", "[toy] step 199: loss 0.005025", "[toy] done in 2.0 s: m = m:v1"]


def test_lines_are_in_the_order_of_their_times():
    metrics = [{"kind": "metrics", "index": i, "values": {"loss": 1.0}} for i in (1, 2)]
    lines = _lines([*metrics, {"kind": "event", "name": "saved", "fields": {"parts": {"a": 0.123456}}}])
    assert lines == ["[toy] step 1: loss 1", "[toy] step 2: loss 1", "[toy] saved: parts={a: 0.1235}"]


def test_a_signal_is_a_sentence_that_says_each_number_once():
    lines = _lines([{"kind": "signal", "name": "kl_spike", "numbers": {"step": 6, "message": "KL is 2", "kl": 2.0}}])
    assert lines == ["[toy] signal kl_spike at step 6: KL is 2"]


def test_a_warning_is_shown_as_it_is():
    assert _lines([{"kind": "warning", "text": "slow; hint: faster", "step": ""}]) == ["▲ slow; hint: faster"]


def test_samples_and_progress_do_not_flood():
    progress = [{"kind": "progress", "description": "reading", "completed": i, "total": 10} for i in range(10)]
    lines = _lines([{"kind": "sample", "sample": {"response": "x"}}, *progress])
    assert lines == ["[toy] reading 0/10"]


@pytest.mark.parametrize("width", [36, 55, 75, 95, 115])
def test_step_and_time_are_there_however_narrow_the_terminal(width):
    name, numbers = "data_prep/sft_prep@tiny_judge", "reward 0.8125  loss 0.01234  kl 0.0008"
    pieces = bar_line(width, name, 0.25, "12/60", numbers, "0:01:23")
    line = "".join(text for text, _ in pieces)
    assert visible_width(line) <= width
    assert "12/60" in line and line.endswith("0:01:23") and "tiny_judge" in line
    assert ("━" in line) == (width >= 95)  # the bar goes before anything that says more
    assert (numbers in line) == (width >= 95)


def test_the_bar_is_as_full_as_the_step_is_done():
    pieces = bar_line(100, "toy", 0.5, "1/2", "", "0:00:01")
    assert [len(text) for text, style in pieces if text.startswith("━")] == [12, 12]
    unknown = bar_line(100, "toy", None, "", "reading", "0:00:01")
    assert [len(text) for text, style in unknown if "━" in text] == [24]


@pytest.mark.parametrize(("share", "full"), [(1.5, 24), (1.0, 24), (-0.5, 0)])
def test_a_bar_is_no_longer_than_it_may_be_whatever_its_step_counted(share, full):
    drawn = [text for text, style in bar_line(100, "toy", share, "3/2", "", "0:00:01") if style == "cyan"]
    assert drawn == ["━" * full]


def test_numbers_that_are_held_back_give_way_to_newer_ones_and_not_to_progress():
    metrics = [{"kind": "metrics", "index": i, "values": {"loss": 1.0}} for i in (1, 2)]
    progress = {"kind": "progress", "description": "reading", "completed": 5, "total": 10}
    finished = {"kind": "step_finished", "outputs": {}, "seconds": 2.0}
    lines = _lines([*metrics, progress, finished])
    assert lines[:2] == ["[toy] step 1: loss 1", "[toy] step 2: loss 1"] and "done in" in lines[2]


def test_progress_that_is_held_back_is_shown_at_the_end_of_its_step_alone():
    progress = [{"kind": "progress", "description": "reading", "completed": i, "total": 10} for i in (0, 5)]
    event = {"kind": "event", "name": "saved", "fields": {}}
    finished = {"kind": "step_finished", "outputs": {}, "seconds": 2.0}
    lines = _lines([*progress, event, finished])
    assert lines[0] == "[toy] reading 0/10" and lines[1].startswith("[toy] saved")
    assert lines[2] == "[toy] reading 5/10" and "done in" in lines[3]


def test_numbers_are_shown_again_after_five_seconds(monkeypatch):
    moments = iter([100.0, 104.9, 105.0])
    monkeypatch.setattr("nemotron_steps.cli.live.time.monotonic", lambda: next(moments))
    lines = _lines([{"kind": "metrics", "index": i, "values": {"loss": 1.0}} for i in (1, 2, 3)])
    assert lines == ["[toy] step 1: loss 1", "[toy] step 3: loss 1"]


@pytest.mark.parametrize(("number", "error"), [(5, OSError), (9, KeyError)])
def test_a_display_that_cannot_be_drawn_goes_dark_and_a_mistake_in_it_is_told(number, error):
    class Broken:
        calls = 0

        def __call__(self, record):
            self.calls += 1
            raise error(number, "gone")

        def close(self):
            self.calls += 10
            raise error(number, "gone")

    broken = Broken()
    display = Tolerant(broken)
    if error is OSError:
        display({})
        display({})
        display.close()
        assert broken.calls == 1
        Tolerant(broken).close()
        assert broken.calls == 11
    else:
        with pytest.raises(error):
            display({})


def test_bars_are_for_a_terminal_that_can_draw_them(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    plan = SimpleNamespace(steps=[])
    for stream, unicode, kind in ((Screen(), True, BarDisplay), (Screen(), False, LineDisplay)):
        display = open_display(Terminal(stream, color=False, width=80, unicode=unicode), plan)
        display.close()
        assert type(display) is kind
    assert type(open_display(Terminal(io.StringIO(), color=False, width=None), plan)) is LineDisplay


def test_a_reader_who_follows_the_lines_sees_each_at_once():
    class Pipe(io.StringIO):
        seen = ""

        def flush(self):
            self.seen = self.getvalue()

    stream = Pipe()
    LineDisplay(Terminal(stream, color=False, width=None))({"kind": "warning", "text": "slow", "step": "", "time": 0.0})
    assert stream.seen.endswith("slow\n")


class Screen(io.StringIO):
    def isatty(self):
        return True


def test_above_the_bars_stands_what_became_of_each_step(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")
    stream = Screen()
    plan = SimpleNamespace(steps=[SimpleNamespace(key="toy/make"), SimpleNamespace(key="toy/train")])
    display = BarDisplay(Terminal(stream, color=False, width=120), plan)
    signal = {"kind": "signal", "step": "toy/train", "name": "kl_spike", "numbers": {"step": 6, "message": "KL is 2"}}
    for record in (
        {"kind": "step_waiting", "step": "toy/make", "holder": {"run": "r7", "pid": 12}},
        {"kind": "step_waiting", "step": "toy/make", "holder": {"pid": 12}},
        {"kind": "step_cached", "step": "toy/make", "reason": "cached"},
        {"kind": "step_cached", "step": "toy/make", "reason": "done before"},
        {"kind": "step_started", "step": "toy/train", "resumed": True},
        {"kind": "progress", "step": "toy/train", "description": "reading", "completed": 3, "total": 1200},
        {"kind": "metrics", "step": "toy/train", "index": 1, "values": {"loss": 0.5}},
        signal,
        signal,  # said once
        {"kind": "step_finished", "step": "toy/train", "seconds": 2.0},
        {"kind": "step_failed", "step": "toy/make"},
    ):
        display(record)
        display._progress.refresh()
    display.close()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())
    lines = [line.strip() for line in re.split(r"[\r\n]+", text) if line.strip()]
    said = [" ".join(line.split()) for line in lines if not re.match("[⠀-⣿]", line)]
    assert said == [
        "waiting for run r7, which makes the same artifact",
        "waiting for process 12, which makes the same artifact",
        "✓ toy/make reused done before",
        "▲ toy/train kl_spike at step 6: KL is 2",
        "✓ toy/train 2.0 s loss 0.5",
        "✗ toy/make failed",
    ]
    bars = [" ".join(line.split()[1:]) for line in lines if re.match("[⠀-⣿]", line)]
    assert any("continues" in bar for bar in bars) and any("3/1,200 reading" in bar for bar in bars)
    assert any("loss 0.5" in bar and "3/1,200" in bar for bar in bars)


def test_a_terminal_gets_bars_and_is_left_tidy(workplace):
    parent, child = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "30"}
    environment.pop("NO_COLOR", None)
    process = subprocess.Popen(
        [sys.executable, "-m", "nemotron_steps.cli.main", "run", "toy/train", "-c", "tiny", "seconds_per_step=0.3"],
        stdout=child,
        stderr=child,
        env=environment,
        cwd=workplace,
    )
    os.close(child)
    output = b""
    while True:
        try:
            data = os.read(parent, 65536)
        except OSError:  # the other end is closed
            break
        if not data:
            break
        output += data
    assert process.wait(timeout=60) == 0
    text = output.decode()
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    assert "━" in plain
    assert re.search(r"2/3\s+reward 0.6667", plain)
    assert "▲ toy/train  reward_saturated" in plain
    assert re.search(r"✓ toy/train\s+\d", plain)
    assert plain.count("▲ this toy is small; hint: steps list") == 1
    assert "0.25 → 0.75" in plain
    # The cursor is shown again after the bars are gone.
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")
