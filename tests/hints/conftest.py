import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import Cli, Result, cli, workplace

__all__ = ["cli", "workplace"]


class Bench:
    """A machine for one fault: `steps …` can be run on it, and what is opened on it is closed at the end."""

    def __init__(self, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
        self._cli = cli
        self.monkeypatch = monkeypatch
        self.closing: list[Callable[[], object]] = []
        self.run: Cli = cli
        """How commands are run; a fault that needs a machine of its own replaces it."""

    def __call__(self, *arguments: str) -> Result:
        return self.run(*arguments)


@pytest.fixture
def bench(cli: Cli, workplace: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(workplace))  # no key of W&B in a home folder
    before = dict(os.environ)
    bench = Bench(cli, monkeypatch)
    yield bench
    for close in bench.closing:
        close()
    os.environ.clear()
    os.environ.update(before)
