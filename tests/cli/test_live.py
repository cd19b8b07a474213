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

from nemotron_steps.cli.terminal import Terminal
from nemotron_steps.cli.watch import LineDisplay, PictureDisplay, Tolerant, headline


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


def test_numbers_are_shown_again_after_five_seconds(monkeypatch):
    moments = iter([100.0, 104.9, 105.0])
    monkeypatch.setattr("nemotron_steps.cli.watch.time.monotonic", lambda: next(moments))
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


class Screen(io.StringIO):
    def isatty(self):
        return True


def test_what_became_of_each_step_stays_on_the_screen_with_every_warning(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    keys = ("make", "reuse", "train", "score")
    steps = [SimpleNamespace(key=f"toy/{key}", step_id="toy/x", config={"max_num_steps": 4}) for key in keys]
    stream = Screen()
    display = PictureDisplay(Terminal(stream, color=False, width=120), SimpleNamespace(name="toy", steps=steps))
    signal = {"kind": "signal", "step": "toy/train", "name": "kl_spike", "numbers": {"step": 6, "message": "KL is 2"}}
    for record in (
        {"kind": "run_started", "step": "", "run": "r1"},
        {"kind": "step_waiting", "step": "toy/make", "holder": {"run": "r7", "pid": 12}},
        {"kind": "step_cached", "step": "toy/make", "reason": "cached"},
        {"kind": "step_cached", "step": "toy/reuse", "reason": "done before"},
        {"kind": "step_started", "step": "toy/train", "resumed": True},
        {"kind": "progress", "step": "toy/train", "description": "reading", "completed": 3, "total": 1200},
        {"kind": "warning", "step": "", "text": "slow\x1b[2J"},
    ):
        display({"time": 1.0, **record})
    display._live.refresh()
    for record in (
        {"kind": "metrics", "step": "toy/train", "index": 1, "values": {"loss": 0.5}},
        signal,
        signal,  # said once
    ):
        display({"time": 2.0, **record})
    display._live.refresh()
    display({"kind": "step_finished", "time": 3.0, "step": "toy/train", "seconds": 2.0})
    display({"kind": "step_failed", "time": 3.0, "step": "toy/score"})
    display.close()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())
    lines = [" ".join(line.split()) for line in re.split(r"[\r\n]+", text) if line.strip()]
    assert "● toy/train running reading 3/1200" in lines and "● toy/train running step 1/4" in lines
    assert "loss 0.5 ▁" in lines
    assert lines[-8:] == [
        *("✓ toy/make cached", "✓ toy/reuse reused", "✓ toy/train ran 2.0 s", "✗ toy/score failed"),
        *("▲ kl_spike at step 6: KL is 2", "steps explain kl_spike"),
        "▲ [toy/make] another run works on the same artifact (run r7, process 12 on ?): waiting for it",
        "▲ slow�[2J",
    ]


def test_a_terminal_gets_a_picture_and_is_left_tidy(workplace):
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
    assert re.search(r"● toy/train\s+running\s+step 2", plain)
    assert re.search(r"reward\s+0.6667\s+▁", plain)
    left = plain[plain.rindex("✓ toy/make") :]
    assert re.search(r"✓ toy/train\s+ran\s+\d", left) and "▲ reward_saturated" in left
    assert left.count("▲ this toy is small; hint: steps list") == 1
    assert "0.25 → 0.75" in left
    # The cursor is shown again after the picture is gone.
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")
