"""When a run saves and stops so that the save is committed in time."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemotron_steps.engine import checkpoints
from nemotron_steps.engine.checkpoints import Deadline


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


SECONDS = st.integers(1, 600).map(float)


@given(loading=SECONDS, step=SECONDS, save=SECONDS, later=st.integers(0, 36_000))
def test_the_last_save_is_committed_in_time_and_another_step_would_not_have_been(
    loading: float, step: float, save: float, later: int
) -> None:
    clock = Clock()
    limit = loading + save + step + save + later
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoints, "time", SimpleNamespace(monotonic=clock.monotonic))
        watched = Deadline(limit, started=0.0)
        clock.now = loading + save
        watched.saved(save)  # an earlier one, so that it is known how long one takes
        watched.step_begins()
        while True:
            clock.now += step
            watched.step_ended()
            if watched.reached:
                break
        committed = clock.now + save
    assert committed <= limit <= committed + step


def test_only_the_last_steps_and_saves_say_how_long_the_next_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(checkpoints, "time", SimpleNamespace(monotonic=clock.monotonic))
    watched = Deadline(1000.0, started=0.0)
    clock.now = 500.0
    watched.step_ended()  # with the compilation of kernels, say
    watched.saved(400.0)
    assert watched.reached
    for _ in range(checkpoints.RECENT - 1):
        watched.saved(1.0)
        clock.now += 1.0
        watched.step_ended()
    assert watched.reached
    watched.saved(1.0)
    clock.now += 1.0
    watched.step_ended()
    assert not watched.reached
    clock.now = 997.9
    assert not watched.reached
    clock.now = 998.0  # a second for a step, one for its save
    assert watched.reached
