import sys
from pathlib import Path

import pytest

from nemotron_steps.runs.executors.base import Launch
from tests.runs.executors.jobs import HERE, ROOT


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Jobs run the toy chain instead of the command line; while the returned gate exists they wait at step 4."""

    def command(self: Launch, *, in_container: bool = False) -> list[str]:
        words = dict(zip(self.arguments[::2], self.arguments[1::2], strict=True))
        return [
            sys.executable,
            str(HERE / "runner_toy_plan.py"),
            words["--home"],
            f"resume={words['--resume']}",
        ]

    monkeypatch.setattr(Launch, "command", command)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{HERE}")
    gate = tmp_path / "gate"
    monkeypatch.setenv("TOY_GATE", str(gate))
    return gate
