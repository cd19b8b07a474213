"""What the start-up probe makes of a sandbox's answers, and what it leaves behind; nothing is run."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from nemotron_steps.errors import SandboxError
from nemotron_steps.sandbox import Limits, Outcome, SandboxResult
from nemotron_steps.sandbox.base import CANARY, MIB, Sandbox
from nemotron_steps.sandbox.probe import SMALL, _canary_folders, probe


class Told(Sandbox):
    """Answers the attempts with these results, and the three processes together with this."""

    def __init__(self, together: SandboxResult, results: dict[str, str | None]) -> None:
        super().__init__()
        self._together, self._results = together, results
        self.asked: list[dict[str, Any]] = []
        self.limits: list[Limits] = []
        self.canaries: list[bool] = []

    async def probe(self) -> None:
        await probe(self, host_paths=("/var",))

    async def execute(self, argv: list[str], stdin: bytes, files: Mapping[str, bytes], limits: Limits) -> SandboxResult:
        assert argv[:4] == [self.python, "-I", "-B", "probe.py"] and b"def main()" in files["probe.py"]
        host = json.loads(stdin)
        self.asked.append(host)
        self.limits.append(limits)
        if "together" in host:
            return self._together
        self.canaries = [Path(file).is_file() for file in host["files"]]
        self.canaries.append(os.environ["SANDBOX_PROBE_CANARY"] == host["secret"])
        report = {"secret": argv[4], "results": self._results}
        return SandboxResult(Outcome.EXITED, 0, json.dumps(report), "", 0.1)


def said(text: str, outcome: Outcome = Outcome.EXITED) -> SandboxResult:
    return SandboxResult(outcome, 0 if outcome is Outcome.EXITED else None, text, "", 0.1)


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("together", "told"),
    [
        (said("1\n"), None),
        (said("2\n"), None),
        (said("", Outcome.MEMORY_LIMIT), None),
        (said("3\n"), "3"),
        (said(""), "exited"),
        (said("", Outcome.TIMEOUT), "timeout"),
    ],
)
def test_three_that_hold_two_fifths_each_are_one_too_many(together: SandboxResult, told: str | None) -> None:
    sandbox = Told(together, {"fork bomb": None})
    if told is None:
        asyncio.run(sandbox.start())
    else:
        with pytest.raises(SandboxError, match="refusing to run any") as caught:
            asyncio.run(sandbox.start())
        assert caught.value.found == f"memory: several processes (three with two fifths of the limit each: {told})"
    assert [host["together"] for host in sandbox.asked if "together" in host] == [256 * MIB // 5 * 2]
    assert sandbox.limits == [SMALL, SMALL]


def test_everything_that_was_reached_is_named_in_order() -> None:
    results = {"network": "connected", "fork bomb": None, "host path /var": "could not be tried: ImportError"}
    with pytest.raises(SandboxError) as caught:
        asyncio.run(Told(said("1\n"), results).start())
    assert caught.value.found == "host path /var (could not be tried: ImportError); network (connected)"


def test_the_canaries_are_there_while_it_works_and_gone_afterwards(place: Path) -> None:
    sandbox = Told(said("1\n"), {})
    asyncio.run(sandbox.start())
    assert len(sandbox.canaries) >= 3 and all(sandbox.canaries)
    assert "SANDBOX_PROBE_CANARY" not in os.environ
    assert not [path for folder in _canary_folders() for path in folder.glob(f"{CANARY}*") if path.parent == place]
    (host,) = [host for host in sandbox.asked if "together" not in host]
    assert (host["memory"], host["scratch_mib"], host["processes"]) == (512 * MIB, 4, 24)
    assert (host["paths"], host["hidden_memory"], host["pid"]) == (["/var"], True, os.getpid())
