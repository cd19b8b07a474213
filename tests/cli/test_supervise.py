"""How the end of a working process that said nothing is told."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.cli.errors import report
from nemotron_steps.runs.run_folder import RunFolder
from nemotron_steps.session.supervise import _death, _said


def _died(said: dict[str, str], status: int) -> int:
    return report(_death(said, status), as_json=False)


@pytest.mark.parametrize(
    ("status", "code", "said"),
    [
        (signal.SIGKILL, 3, "killed by SIGKILL"),
        (5 << 8, 3, "exit code 5"),
        (signal.SIGTERM, 130, "ended by SIGTERM"),
        (signal.SIGINT, 130, "ended by SIGINT"),
    ],
)
def test_an_end_without_a_word_is_an_interruption_where_a_signal_of_the_user_was_its_cause(
    status: int, code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _died({}, status) == code
    assert said in capsys.readouterr().err


def test_what_cannot_be_written_down_is_told_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert _died({"run": "r1", "home": str(tmp_path / "file")}, signal.SIGKILL) == 3
    err = capsys.readouterr().err
    assert "ended without a word" in err and "what happened could not be written down: the home is not a folder" in err


def test_the_run_that_died_is_journalled_in_its_home(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = ArtifactStore(tmp_path / "home")
    folder = RunFolder(store, "r1")
    folder.update(folder.create("toy/train", {}), status="running")
    assert _died({"run": "r1", "home": str(tmp_path / "home")}, signal.SIGKILL) == 3
    assert "steps run --resume r1" in capsys.readouterr().err
    info = folder.load()
    assert info is not None and (info.status, (info.error or {})["found"]) == ("failed", "killed by SIGKILL")


def test_the_last_word_on_each_thing_counts_though_others_hold_the_pipe_open() -> None:
    told, tells = os.pipe()
    os.write(tells, b'{"run": "r1", "home": "here"}\n{"code": 1}\n{"code": 0}\n')
    assert _said(told) == {"run": "r1", "home": "here", "code": 0}
    assert _said(told) == {}
    os.close(tells)
    assert _said(told) == {}
    os.close(told)
