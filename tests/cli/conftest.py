import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from nemotron_steps.cli.main import steps

TOY_PACK = Path(__file__).parent / "toy_pack"


@dataclass(frozen=True)
class Result:
    """What a command printed and returned."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Cli = Callable[..., Result]


def forget_new_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `steps new` has written for another test is of the same name."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "steps_pack"]:
        monkeypatch.delitem(sys.modules, name)


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory with the toy pack on STEPS_PATH, a home and a cache of its own."""
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("STEPS_PATH", str(TOY_PACK))
    monkeypatch.setenv("STEPS_HOME", str(folder / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("PYTHONPATH", str(TOY_PACK), prepend=os.pathsep)
    monkeypatch.syspath_prepend(str(TOY_PACK))
    forget_new_packages(monkeypatch)
    monkeypatch.delenv("TOY_JUDGE", raising=False)
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    return folder


def in_process(program: Callable[[Sequence[str]], int], capsys: pytest.CaptureFixture[str]) -> Cli:
    """A program of ours as a function of its arguments."""

    def run(*arguments: str) -> Result:
        capsys.readouterr()
        code = program(arguments)
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return run


@pytest.fixture
def cli(workplace: Path, capsys: pytest.CaptureFixture[str]) -> Cli:
    """Run `steps ARGUMENTS` in this process."""
    return in_process(steps, capsys)


def until_at_work(process: subprocess.Popen[Any], folder: Path = Path()) -> None:
    """Wait until the run of a process has reported numbers."""
    deadline = time.monotonic() + 60
    while not any(file.stat().st_size for file in (folder / "home" / "runs").glob("*/metrics.jsonl")):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
