"""An engine in a process of its own may die without a word: vLLM's client would wait for it for ever."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from nemotron_steps.errors import RESUME, WorkerLostError
from nemotron_steps.waiting import waiting

LOOK_SECONDS = 1.0
"""How often a wait looks whether the engine lives."""

Answer = TypeVar("Answer")


def wait_for_output(llm: Any) -> None:
    """Wait until the engine has sent something that `llm.step()` can take. WorkerLostError when it is dead."""
    arrived = llm.engine_core.outputs_queue
    while True:
        with arrived.not_empty:
            if arrived.not_empty.wait_for(lambda: arrived.queue, timeout=LOOK_SECONDS):
                return
        if is_dead(llm):
            raise lost_engine("it ended while samples were running")


def call(llm: Any, function: Callable[[], Answer], seconds: float) -> Answer:
    """What a call of the engine answers.

    Raises:
        WorkerLostError: the engine died, or did not answer within `seconds`.
    """
    answer: Future[Answer] = Future()

    def run() -> None:
        try:
            answer.set_result(function())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=run, name="call of vLLM", daemon=True).start()
    waited = 0.0
    with waiting("an answer of the vLLM engine", seconds):
        while waited < seconds:
            try:
                return answer.result(timeout=LOOK_SECONDS)
            except TimeoutError:
                if answer.done():
                    return answer.result()
                if is_dead(llm):
                    raise lost_engine("it ended while it was asked for something") from None
            waited += LOOK_SECONDS
    raise lost_engine(f"it has not answered for {seconds:.0f} s")


def is_dead(llm: Any) -> bool:
    """Whether vLLM's client has lost its engine, or the process has ended."""
    resources = llm.engine_core.resources
    processes = getattr(resources.engine_manager, "processes", ())
    return bool(resources.engine_dead) or any(process.exitcode is not None for process in processes)


def lost_engine(found: str) -> WorkerLostError:
    """What to say of it."""
    return WorkerLostError(
        "the process of a vLLM engine is lost",
        where=f"a child of process {os.getpid()} on {socket.gethostname()}",
        found=found,
        hints=[f"{RESUME}   # goes on from the last checkpoint"],
    )
