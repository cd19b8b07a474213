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


def test_a_folder_with_a_long_name_can_be_added(cli, tmp_path):
    folder = tmp_path / ("b" * 250)
    folder.mkdir()
    (folder / "train.jsonl").write_text('{"a": 1}\n')
    assert cli("artifacts", "add", str(folder), "--type", "toy_rows").code == 0
    assert len(cli("artifacts", "list", "--json").json[0]["name"]) == 200
