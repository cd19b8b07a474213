"""A terminal shows how far the hashing of a large input is."""

from __future__ import annotations

import io
import json
import sys

import pytest

from nemotron_steps.artifacts import imports


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("terminal", [True, False])
def test_planning_with_a_large_input_shows_that_it_is_hashed_once(cli, workplace, monkeypatch, caplog, terminal):
    monkeypatch.setattr(imports, "_WORTH_SAYING", 1)
    monkeypatch.setenv("TERM", "xterm")
    (workplace / "rows[1]").mkdir()
    (workplace / "rows[1]" / "train.jsonl").write_text(json.dumps({"a": 1}) + "\n")
    cli("run", "toy/train", "-c", "tiny")  # a home that holds something is looked through
    caplog.clear()
    seen = []
    for _ in range(2):
        screen = Screen()
        with monkeypatch.context() as patch:
            if terminal:
                patch.setattr(sys, "stderr", screen)
            assert cli("plan", "toy/train", "-c", "tiny", "--input", "rows=./rows[1]").code == 0
        seen.append("hashing rows[1]" in screen.getvalue())
    assert seen == [terminal, False]
    assert ("hashing" in caplog.text) == (not terminal)
