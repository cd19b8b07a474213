"""A name that no file system takes is the request's mistake, wherever it stands."""

from __future__ import annotations

import pytest

LONG = "a" * 300


@pytest.mark.parametrize(
    "command",
    [
        ("artifacts", "show", LONG),
        ("artifacts", "add", LONG),
        ("artifacts", "list", "--name", LONG),
        ("plan", LONG),
        ("plan", f"{LONG}.toml"),
        ("plan", "toy/train", "-c", LONG),
        ("plan", "toy/train", "-c", f"./{LONG}.yaml"),
        ("plan", "toy/train", "--input", f"rows={LONG}"),
        ("plan", "toy/train", "--input", f"rows=./{LONG}"),
        ("run", "toy/train", "--input", f"rows={LONG}:v1"),
        ("run", "--resume", LONG),
        ("status", LONG),
        ("runs", "--home", f"./{LONG}"),
    ],
    ids=lambda command: " ".join(command).replace(LONG, "LONG"),
)
def test_a_long_name_is_refused_without_a_traceback(cli, command):
    result = cli(*command)
    assert result.code == (0 if "--name" in command else 2)
    assert "Traceback" not in result.err and "internal error" not in result.err
