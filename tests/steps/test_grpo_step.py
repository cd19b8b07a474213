"""What a GRPO step puts around its loop, without a model: held-out prompts, left-out ones, and what is closed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from nemotron_steps.errors import ConfigError
from nemotron_steps.steps import grpo


class Environments:
    """Notes what is asked of it; may fail or hang when it is closed."""

    def __init__(self, notes: list[Any], close: BaseException | float | None = None) -> None:
        self._notes, self._close = notes, close

    async def start(self) -> None:
        self._notes.append("start")

    async def close(self) -> None:
        self._notes.append("close")
        if isinstance(self._close, float):
            await asyncio.sleep(self._close)
        elif self._close is not None:
            raise self._close


@pytest.mark.parametrize(("close", "noted"), [(ConfigError("stuck"), "stuck"), (5.0, "TimeoutError"), (None, None)])
def test_what_stopped_a_run_is_told_first_however_its_environments_close(
    close: Any, noted: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpo, "_CLOSE_SECONDS", 0.01)
    notes: list[Any] = []
    with pytest.raises(KeyError) as caught, grpo._started_environments(Environments(notes, close)):  # type: ignore[arg-type]
        raise KeyError("first")
    told = getattr(caught.value, "__notes__", [])
    assert notes == ["start", "close"] and len(told) == (noted is not None)
    assert all("did not close" in note and str(noted) in note for note in told)
