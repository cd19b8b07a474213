"""Locks between processes: who holds one, and that no child keeps one for its parent."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from nemotron_steps.runs.locks import hold, hold_if_free, is_held


@contextmanager
def child() -> Iterator[None]:
    """A forked process that lives until the end."""
    (reading, writing), (hearing, telling) = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(writing)
        os.write(telling, b"x")
        os.read(reading, 1)
        os._exit(0)
    os.close(reading)
    os.close(telling)
    os.read(hearing, 1)  # it has begun, and done what a child does first
    os.close(hearing)
    try:
        yield
    finally:
        os.close(writing)
        os.waitpid(pid, 0)


def test_a_lock_is_had_by_one_and_free_again_afterwards(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    assert not is_held(lock)
    with hold_if_free(lock) as first, hold_if_free(lock) as second:
        assert (first, second, is_held(lock)) == (True, False, True)
    with hold(tmp_path / "deep" / "lock", {}, lambda holder: None) as waited:
        assert not waited and is_held(tmp_path / "deep" / "lock")
        with hold_if_free(tmp_path / "deep" / "lock") as free:
            assert not free
        assert is_held(tmp_path / "deep" / "lock"), "who did not have it does not let go of it"
    assert not is_held(lock) and not is_held(tmp_path / "deep" / "lock")


@pytest.mark.parametrize("how", ["hold", "hold_if_free"])
def test_a_child_that_lives_on_keeps_no_lock_of_its_parents(tmp_path: Path, how: str) -> None:
    lock = tmp_path / "lock"
    held = hold(lock, {}, lambda holder: None) if how == "hold" else hold_if_free(lock)
    with held:
        born = child()
        born.__enter__()
        assert is_held(lock), "a child that starts does not let go of it for its parent"
    try:
        assert not is_held(lock)
    finally:
        born.__exit__(None, None, None)
