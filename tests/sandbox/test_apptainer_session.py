"""An Apptainer image over many commands: what Apptainer is asked, and how a session of it ends. The program in its
place runs what it is given on this machine."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from nemotron_steps.errors import SandboxError
from nemotron_steps.sandbox.base import Limits, Outcome
from nemotron_steps.sandbox.command_server import COMMAND_SERVER
from nemotron_steps.sandbox.container_session import ApptainerSession
from nemotron_steps.sandbox.session import SessionOverError

RUNS = 'while [ "$1" != repo.sif ]; do shift; done; shift; exec "$@"'


@pytest.fixture
def apptainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    def make(does: str) -> None:
        (tmp_path / "apptainer").write_text(f'#!/bin/sh\n[ "$1" != version ] || exit 0\n{does}\n')
        (tmp_path / "apptainer").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    return make


def over(script: str, **limits: float) -> Outcome:
    """How a session ends in which a command does something."""

    async def body() -> Outcome:
        bounds = Limits(**{"wall_s": 30.0, **limits})
        session = ApptainerSession("repo.sif", asyncio.Semaphore(1), limits=bounds, command_s=30.0)
        async with session:
            assert (await session.run(["echo", "on"])).stdout == "on\n"
            with pytest.raises(SessionOverError) as caught:
                await session.run(["sh", "-c", script])
            return caught.value.outcome

    return asyncio.run(body())


def test_an_image_is_closed_off_bounded_and_ends_without_anybody_outside() -> None:
    limits = Limits(wall_s=2.0, memory_bytes=11, processes=13)
    words = ApptainerSession("repo.sif", asyncio.Semaphore(1), limits=limits).arguments("/p.json")
    assert words == [
        *("apptainer", "--quiet", "exec", "--containall", "--cleanenv", "--no-home", "--no-privs"),
        *("--security", "seccomp:/p.json", "--net", "--network", "none", "--writable-tmpfs"),
        *("--memory", "11", "--pids-limit", "13", "repo.sif", "timeout", "-s", "KILL", "122.0"),
        *("python3", "-I", "-c", COMMAND_SERVER, "0", "1", "together"),
    ]


def test_a_session_that_is_killed_was_killed_for_memory(apptainer: Callable[[str], None]) -> None:
    apptainer(RUNS)
    assert over("kill -9 $PPID") is Outcome.MEMORY_LIMIT
    assert over("read _ _ _ clock _ < /proc/$PPID/stat; kill -9 $clock $PPID") is Outcome.MEMORY_LIMIT
    assert over("kill -TERM $PPID; sleep 3") is Outcome.EXITED


def test_a_session_ends_when_its_time_is_over(apptainer: Callable[[str], None]) -> None:
    apptainer(RUNS)
    assert over("sleep 60", wall_s=2.0) is Outcome.TIMEOUT


def test_the_time_of_a_session_begins_when_its_image_is_there(apptainer: Callable[[str], None]) -> None:
    apptainer(f"sleep 3; {RUNS}")
    assert over("sleep 60", wall_s=2.0) is Outcome.TIMEOUT


def test_what_apptainer_leaves_behind_holds_no_session_up(apptainer: Callable[[str], None]) -> None:
    """With the pipes of the server open, out of its group."""
    apptainer(f"setsid sleep 30 & {RUNS}")
    begun = time.monotonic()
    assert over("kill -9 $PPID") is Outcome.MEMORY_LIMIT
    assert time.monotonic() - begun < 25


def test_an_image_that_does_not_start_is_told_by_the_end_of_what_was_said(apptainer: Callable[[str], None]) -> None:
    apptainer("head -c 9000 /dev/zero | tr '\\0' x >&2; echo ' no such image' >&2; exit 255")

    async def enter() -> None:
        async with ApptainerSession("repo.sif", asyncio.Semaphore(1)):
            raise AssertionError("entered")

    with pytest.raises(SandboxError, match="ended before its first command") as caught:
        asyncio.run(enter())
    assert (caught.value.found or "").endswith("xxx no such image\n")
