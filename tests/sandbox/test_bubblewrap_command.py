"""What bubblewrap is asked for, and how the end of a run is judged, without running it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest

from nemotron_steps.errors import SandboxError
from nemotron_steps.sandbox import Limits, Outcome, SandboxResult, bubblewrap
from nemotron_steps.sandbox.bubblewrap import FIRST_UID, UIDS_PER_PROCESS, BubblewrapSandbox, Descriptors
from nemotron_steps.sandbox.process import Ended, Watch

LIMITED = Limits(cpu_s=7, memory_bytes=11, processes=13, file_bytes=17, scratch_bytes=19, open_files=29)


def command(sandbox: BubblewrapSandbox | None = None, files: dict[str, int] | None = None) -> list[str]:
    return (sandbox or BubblewrapSandbox()).command(["x"], LIMITED, Descriptors(10, 11, files or {}))


def after(words: list[str], option: str, count: int = 1) -> list[list[str]]:
    """The values of an option, each time it is given."""
    return [words[at + 1 : at + 1 + count] for at, word in enumerate(words) if word == option]


def test_root_runs_each_program_as_a_user_of_its_own_and_anybody_else_as_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    users = [int(after(command(), "--reuid")[0][0]) for _ in range(3)]
    first = FIRST_UID + os.getpid() % 65536 * UIDS_PER_PROCESS
    assert len(set(users)) == 3 and all(first <= user < first + UIDS_PER_PROCESS for user in users)
    assert {"--no-new-privs", "--clear-groups", "--inh-caps=-all", "--bounding-set=-all"} <= set(command())
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    words = command()
    assert "setpriv" not in words and "--cap-add" not in words
    assert {"--unshare-all", "--unshare-user", "--disable-userns"} <= set(words)
    assert (after(words, "--uid"), after(words, "--gid")) == ([["65534"]], [["65534"]])


class Group:
    procs = "/sys/fs/cgroup/x/cgroup.procs"
    full = False

    def was_full(self) -> bool:
        return self.full


def judged(
    monkeypatch: pytest.MonkeyPatch, ended: Ended, group: Group | None = None
) -> tuple[SandboxResult, list[str], dict[str, Any]]:
    """What becomes of a run that ended so, the command, and what else the host's process was given."""
    asked: list[Any] = []

    async def run_process(argv: list[str], stdin: bytes, **options: Any) -> Ended:
        asked.extend((argv, options))
        return ended

    @contextmanager
    def try_to_make(memory_bytes: int) -> Iterator[Group | None]:
        assert memory_bytes == 11
        yield group

    monkeypatch.setattr(bubblewrap, "run_process", run_process)
    monkeypatch.setattr(bubblewrap.MemoryGroup, "try_to_make", try_to_make)
    result = asyncio.run(BubblewrapSandbox().execute(["x"], b"", {"a": b"1"}, LIMITED))
    return result, *asked  # type: ignore[return-value]


def ended(outcome: Outcome = Outcome.EXITED, code: int = 0, wall_s: float = 1.0, ready: bool = True) -> Ended:
    return Ended(outcome, code, "out", "it says why", wall_s, ready)


@pytest.mark.parametrize(
    ("how", "outcome", "code"),
    [
        (ended(code=3), Outcome.EXITED, 3),
        (ended(code=128 + 24), Outcome.TIMEOUT, None),  # SIGXCPU
        (ended(code=128 + 9, wall_s=7.0), Outcome.TIMEOUT, None),
        (ended(code=128 + 9, wall_s=6.9), Outcome.EXITED, 137),
        (ended(Outcome.MEMORY_LIMIT, -9, ready=False), Outcome.MEMORY_LIMIT, None),
        (ended(Outcome.OUTPUT_LIMIT, -9), Outcome.OUTPUT_LIMIT, None),
    ],
)
def test_how_a_run_ended_is_told(
    monkeypatch: pytest.MonkeyPatch, how: Ended, outcome: Outcome, code: int | None
) -> None:
    for group in (None, Group()):
        result, _, _ = judged(monkeypatch, how, group)
        assert (result.outcome, result.exit_code, result.stdout) == (outcome, code, "out")


def test_a_group_that_was_full_tells_that_the_kernel_killed_for_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group()
    group.full = True
    assert judged(monkeypatch, ended(code=137), group)[0].outcome is Outcome.MEMORY_LIMIT


def test_memory_is_watched_where_no_group_counts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for group, watched in ((None, 11), (Group(), None)):
        _, words, options = judged(monkeypatch, ended(), group)
        watch: Watch = options["watch"]
        assert (watch.memory_bytes, watch.folders) == (watched, ("/scratch", "/tmp"))
        assert (Group.procs in words) is (group is not None)
        assert options["environment"].keys() == {"PATH"} and options["wall_s"] == LIMITED.wall_s
        given = [int(number) for number, word in pairwise(words) if word.startswith("/scratch/")]
        assert set(given) <= set(options["pass_fds"]) and len(options["pass_fds"]) == 3


@pytest.mark.parametrize(("user", "hinted"), [(0, False), (1000, True)])
def test_a_sandbox_that_is_not_set_up_is_an_error_that_says_what_a_host_may_forbid(
    monkeypatch: pytest.MonkeyPatch, user: int, hinted: bool
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: user)
    with pytest.raises(SandboxError, match="could not be set up") as caught:
        judged(monkeypatch, ended(code=1, ready=False))
    assert caught.value.found == "exited, exit code 1: it says why"
    assert any("userns" in hint for hint in caught.value.hints) is hinted
