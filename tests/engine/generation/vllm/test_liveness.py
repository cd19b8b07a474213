"""An engine whose process may die: what is waited for, and when it is given up. A queue and processes, no vLLM."""

from __future__ import annotations

import queue
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from nemotron_steps.engine.generation.vllm import liveness
from nemotron_steps.errors import WorkerLostError


def engine(*exit_codes: int | None, lost: bool = False) -> Any:
    manager = SimpleNamespace(processes=[SimpleNamespace(exitcode=code) for code in exit_codes])
    resources = SimpleNamespace(engine_dead=lost, engine_manager=manager)
    return SimpleNamespace(engine_core=SimpleNamespace(resources=resources, outputs_queue=queue.Queue()))


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "LOOK_SECONDS", 0.02)


def test_what_a_dead_engine_had_sent_is_taken_before_it_is_given_up() -> None:
    dead = engine(-9)
    dead.engine_core.outputs_queue.put("sample")
    liveness.wait_for_output(dead)
    dead.engine_core.outputs_queue.get()
    with pytest.raises(WorkerLostError, match="lost"):
        liveness.wait_for_output(dead)


def test_a_call_answers_raises_or_is_given_up() -> None:
    assert liveness.call(engine(None), lambda: 5, 60.0) == 5
    with pytest.raises(KeyError):
        liveness.call(engine(None), lambda: {}["x"], 60.0)
    with pytest.raises(TimeoutError, match="its own"):

        def late() -> None:
            raise TimeoutError("its own")

        liveness.call(engine(None), late, 0.2)
    never = threading.Event()
    try:
        for llm, seconds, found in ((engine(-9), 60.0, "it ended"), (engine(None), 0.05, "has not answered")):
            with pytest.raises(WorkerLostError) as caught:
                liveness.call(llm, never.wait, seconds)
            assert found in str(caught.value.found)
    finally:
        never.set()
