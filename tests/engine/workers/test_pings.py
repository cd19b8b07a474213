"""A worker that answers once and then no more, without Ray: pings that are answered when the test says so."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from nemotron_steps.engine.workers import workers
from nemotron_steps.engine.workers.workers import SILENT_SECONDS, Worker


def test_an_answered_ping_is_followed_by_another_and_the_silence_counts_from_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ray = pytest.importorskip("ray")
    clock = SimpleNamespace(monotonic=lambda: clock.now, now=0.0)
    answered: set[int] = set()
    asked: list[int] = []

    def ping(*_: Any) -> int:
        asked.append(len(asked))
        return asked[-1]

    method = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=ping))
    worker = Worker("rank 0", SimpleNamespace(ping=method))
    monkeypatch.setattr(workers, "time", clock)
    monkeypatch.setattr(workers, "result_of", lambda reference, worker: None)
    monkeypatch.setattr(ray, "wait", lambda references, timeout: (answered & {*references}, []))
    pings: dict[str, tuple[Any, float]] = {}

    def check(now: float) -> None:
        clock.now = now
        workers._check_pings([worker], pings)

    check(0.0)
    answered.add(0)
    check(SILENT_SECONDS + 10)  # late, and yet an answer
    assert asked == [0]
    check(SILENT_SECONDS + 20)
    assert asked == [0, 1]
    check(2 * SILENT_SECONDS + 20)  # silent as long as it may be
    with pytest.raises(workers.WorkerLostError, match="`rank 0` is lost"):
        check(2 * SILENT_SECONDS + 21)
