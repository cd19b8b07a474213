"""SIGINT and SIGTERM while a run works: the first is an interrupt, what was there before is there again."""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

import pytest

from nemotron_steps import stopping
from nemotron_steps.stopping import interruptible, left_to_us, was_interrupted

NUMBERS = (signal.SIGINT, signal.SIGTERM)


@pytest.mark.parametrize("number", NUMBERS)
def test_the_first_signal_is_an_interrupt_that_says_which_and_the_handlers_are_put_back(number: signal.Signals) -> None:
    before = [signal.getsignal(each) for each in NUMBERS]
    with pytest.raises(KeyboardInterrupt), interruptible() as seen:
        assert [signal.getsignal(each) for each in NUMBERS] != before
        signal.raise_signal(number)
    assert seen == {"signal": number.name}
    assert [signal.getsignal(each) for each in NUMBERS] == before


def test_beside_the_main_thread_no_signal_is_handled() -> None:
    seen: list[object] = []

    def work() -> None:
        with interruptible() as told:
            seen.append((dict(told), signal.getsignal(signal.SIGTERM)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [({}, signal.getsignal(signal.SIGTERM))]


@pytest.mark.parametrize("ends_process", [True, False])
def test_a_signal_amid_the_change_of_handlers_leaves_none_behind(
    ends_process: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After each call of its own in turn, which is where Python would hear one; in a notebook a second one too."""
    monkeypatch.setattr(stopping, "AGAIN_S", 0.02)
    monkeypatch.setattr(stopping, "SAME_S", 0.0)
    before, moment, came = [signal.getsignal(each) for each in NUMBERS], 0, True
    while came:
        moment, left, came = moment + 1, moment + 1, False

        def at(frame: FrameType, event: str, _: object) -> None:
            nonlocal left, came
            if event == "c_return" and frame.f_code.co_filename == stopping.__file__:
                left -= 1
                if left == 0:
                    came = True
                    sys.setprofile(None)
                    signal.raise_signal(signal.SIGINT)

        sys.setprofile(at)
        with suppress(KeyboardInterrupt), interruptible(ends_process):
            if not ends_process:
                with suppress(KeyboardInterrupt):
                    signal.raise_signal(signal.SIGINT)
        sys.setprofile(None)
        assert [signal.getsignal(each) for each in NUMBERS] == before, moment
        assert not stopping.was_asked(), moment
    assert moment > 5
    time.sleep(0.1)  # nothing raises again


@pytest.mark.parametrize("library", [lambda number, _: sys.exit(number), lambda *_: None])
def test_a_handler_of_a_librarys_own_takes_no_request_to_stop(library: Callable[..., None]) -> None:
    with pytest.raises(KeyboardInterrupt), interruptible() as seen, left_to_us():
        signal.signal(signal.SIGTERM, library)
        signal.raise_signal(signal.SIGTERM)
    assert seen == {"signal": "SIGTERM"}
    with pytest.raises(SystemExit), interruptible(), left_to_us():
        sys.exit(int(signal.SIGINT))  # as of a wrong usage


def test_an_interrupt_within_a_task_leaves_no_traceback_of_asyncio() -> None:
    code = (
        "import asyncio, gc, os, signal\n"
        "from nemotron_steps.stopping import interruptible\n"
        "async def judge(): pass\n"
        "async def wait(work): await work\n"
        "async def work(): os.kill(os.getpid(), signal.SIGINT)\n"
        "async def main():\n"
        "    tasks = [asyncio.ensure_future(work()), asyncio.ensure_future(wait(judge()))]\n"
        "    await asyncio.gather(*tasks)\n"
        "try:\n"
        "    with interruptible():\n"
        "        asyncio.run(main())\n"
        "except KeyboardInterrupt:\n"
        "    print('interrupted')\n"
        "gc.collect()\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (result.stdout, result.stderr) == ("interrupted\n", "")


def test_an_interrupt_is_found_behind_what_was_raised_after_it() -> None:
    error, between = RuntimeError("the loop was stopped"), ValueError("x")
    error.__cause__, between.__context__ = between, KeyboardInterrupt()
    assert was_interrupted(error)
