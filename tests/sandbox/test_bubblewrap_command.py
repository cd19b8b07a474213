"""As whom programs run, told by what bubblewrap is asked for."""

import os

import pytest

from nemotron_steps.sandbox import Limits
from nemotron_steps.sandbox.bubblewrap import FIRST_UID, UIDS_PER_PROCESS, BubblewrapSandbox, Descriptors

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
