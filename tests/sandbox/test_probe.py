"""The start-up probe refuses a sandbox that lacks any one of its protections, and a report that is not whole."""

import asyncio
import functools
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nemotron_steps.errors import SandboxError
from nemotron_steps.sandbox import Limits, Outcome, SandboxResult
from nemotron_steps.sandbox.bubblewrap import BubblewrapSandbox
from nemotron_steps.sandbox.probe import probe
from nemotron_steps.sandbox.process import Rest, Watch
from nemotron_steps.sandbox.seccomp import DANGEROUS, NETWORK, SHARING, allowed, architecture, calls, filter_program

pytestmark = pytest.mark.sandbox
ROOT = os.geteuid() == 0
needs_root = pytest.mark.skipif(not ROOT, reason="a user namespace holds where this is taken away")

Change = Callable[[list[str]], list[str]]


class Weakened(BubblewrapSandbox):
    """A sandbox with one protection taken away."""

    def __init__(self, change: Change = list, *, also: tuple[str, ...] = ()) -> None:
        super().__init__()
        self._change, self._also = change, also

    def command(self, *arguments: Any) -> list[str]:
        return self._change(super().command(*arguments))

    def filter_program(self) -> bytes:
        return filter_program(architecture(), also=self._also)


def without(*parts: str) -> Change:
    return lambda command: [part for part in command if part not in parts]


def swapped(prefix: str, new: str) -> Change:
    return lambda command: [new if part.startswith(prefix) else part for part in command]


def before_the_end(*parts: str) -> Change:
    """Further options of bubblewrap."""

    def change(command: list[str]) -> list[str]:
        place = command.index("--remount-ro")
        return [*command[:place], *parts, *command[place:]]

    return change


def with_network(command: list[str]) -> list[str]:
    if ROOT:
        return without("--unshare-net")(command)
    place = command.index("--unshare-all")
    return [*command[: place + 1], "--share-net", *command[place + 1 :]]


def as_root(command: list[str]) -> list[str]:
    """Without setpriv, and so with the capabilities that it needs."""
    place = command.index("setpriv")
    return [*command[:place], *command[command.index("--", place) + 1 :]]


def larger_scratch(command: list[str]) -> list[str]:
    return [str(2**30) if before == "--size" else part for before, part in zip(["", *command], command, strict=False)]


def writable_root(command: list[str]) -> list[str]:
    place = command.index("--remount-ro")
    return [*command[:place], "--chmod", "1777", "/", *command[place + 2 :]]


def found_in(sandbox: BubblewrapSandbox) -> str:
    """What the probe says got through."""
    with pytest.raises(SandboxError, match="refusing to run") as caught:
        asyncio.run(sandbox.run(code="print('ran anyway')"))
    return caught.value.found or ""


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (with_network, "network: interfaces"),
        (swapped("--nproc=", "--nproc=1000"), "fork bomb"),
        (swapped("--core=", "--core=0:0"), "privileges: core dumps"),
        (larger_scratch, "scratch size"),
        (larger_scratch, "temporary size"),
        (before_the_end("--bind", "/var", "/var"), "host path /var"),
        (before_the_end("--bind", str(Path.cwd()), str(Path.cwd())), "host file"),
        (before_the_end("--setenv", "LEAKED", "canary"), "environment"),
        (before_the_end("--dev-bind", "/dev/zero", "/dev/zero"), "memory: /dev/zero"),
        (before_the_end("--perms", "1777", "--tmpfs", "/dev/shm"), "memory: /dev/shm"),
        (before_the_end("--ro-bind", "/proc/version", "/proc/keys"), "kernel file /proc/keys"),
        (writable_root, "write to /"),
        pytest.param(as_root, "privileges: user id", marks=needs_root),
        pytest.param(as_root, "privileges: capabilities", marks=needs_root),
    ],
)
def test_the_probe_refuses_a_sandbox_without(change: Change, named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if named == "environment":
        monkeypatch.setattr("nemotron_steps.sandbox.probe.secrets.token_hex", lambda _: "canary")
    assert named in found_in(Weakened(change))


@pytest.mark.skipif(not ROOT, reason="needs a process namespace without a user namespace")
def test_the_probe_refuses_a_sandbox_that_sees_the_hosts_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    unwatched(monkeypatch)
    found = found_in(Weakened(without("--unshare-pid")))
    assert "host process" in found and "left behind" in found


def unwatched(monkeypatch: pytest.MonkeyPatch) -> None:
    def watch(status: int, _: int | None, folders: tuple[str, ...], rest: Rest | None) -> Watch:
        return Watch(status, None, folders, rest)

    monkeypatch.setattr("nemotron_steps.sandbox.bubblewrap.Watch", watch)


def test_the_probe_refuses_a_sandbox_whose_processes_together_hold_more(monkeypatch: pytest.MonkeyPatch) -> None:
    unwatched(monkeypatch)
    assert found_in(Weakened()).startswith("memory: several processes")
    assert "memory: one process" in found_in(Weakened(swapped("--as=", "--as=unlimited")))


@functools.cache
def found_without_a_filter() -> str:
    return found_in(Weakened(also=("*", "mmap", "clone", "socket", "socketpair", "setrlimit", "prlimit64")))


REFUSED_BY_KERNELS = {
    # By capability or configuration, on this or that kernel, before they look at what they are given.
    *("acct", "bpf", "chroot", "delete_module", "fanotify_init", "finit_module", "init_module", "ioperm", "iopl"),
    *("kexec_file_load", "kexec_load", "lookup_dcookie", "memfd_secret", "nfsservctl", "perf_event_open"),
    *("pivot_root", "reboot", "sethostname", "setdomainname", "swapon", "swapoff", "syslog", "uselib", "vhangup"),
    *("_sysctl", "clock_adjtime", "clock_settime", "settimeofday", "adjtimex", "open_by_handle_at", "umount2"),
    *("fsopen", "fsmount", "fspick", "fsconfig", "move_mount", "open_tree", "mount_setattr", "modify_ldt", "sysfs"),
    *("mq_open", "mq_unlink", "mq_timedsend", "mq_timedreceive", "mq_notify", "mq_getsetattr", "quotactl"),
    *("io_uring_setup", "io_uring_enter", "io_uring_register", "userfaultfd", "landlock_create_ruleset"),
    *("move_pages", "migrate_pages", "mbind", "set_mempolicy", "get_mempolicy", "quotactl_fd", "name_to_handle_at"),
}


@pytest.mark.parametrize(
    "name",
    [
        *("namespace: user", "namespace: mount", "namespace: network", "namespace: pid", "namespace: ipc"),
        *("network: socket families", "memory: shared", "privileges: core dumps", "kernel keyring"),
        *(
            f"system call {name}"
            for name in calls(architecture(), NETWORK, SHARING, DANGEROUS)
            if name not in REFUSED_BY_KERNELS
        ),
    ],
)
def test_without_the_filter_the_probe_names(name: str) -> None:
    assert f"{name} (" in found_without_a_filter()


@pytest.mark.parametrize(
    ("also", "named"),
    [
        (("keyctl",), "kernel keyring"),
        (("clone",), "namespace: user"),
        (("mmap",), "memory: shared"),
        (("socket",), "network: socket families"),
        (("setrlimit", "prlimit64"), "privileges: core dumps"),
    ],
)
def test_one_call_too_many_is_enough(also: tuple[str, ...], named: str) -> None:
    found = found_in(Weakened(also=also))
    assert named in found
    assert found.count(";") <= 8, "and nothing is named that it has nothing to do with"


class Answering(BubblewrapSandbox):
    """A sandbox whose probe gets an answer that is not its own."""

    def __init__(self, change: Callable[[SandboxResult], SandboxResult]) -> None:
        super().__init__()
        self._change = change

    async def execute(self, argv: list[str], stdin: bytes, files: Mapping[str, bytes], limits: Limits) -> SandboxResult:
        return self._change(await super().execute(argv, stdin, files, limits))


@pytest.mark.parametrize(
    "change",
    [
        lambda result: replace(result, stdout=""),
        lambda result: replace(result, stdout=json.dumps({"secret": "guessed", "results": {}})),
        lambda result: replace(result, exit_code=1),
        lambda result: replace(result, outcome=Outcome.TIMEOUT),
    ],
)
def test_a_report_that_is_not_whole_refuses(change: Callable[[SandboxResult], SandboxResult]) -> None:
    with pytest.raises(SandboxError, match="did not run to its end"):
        asyncio.run(Answering(change).start())


def test_the_probe_passes_where_everything_holds_and_lists_every_attempt() -> None:
    reports: list[dict[str, Any]] = []

    def keep(result: SandboxResult) -> SandboxResult:
        if result.ok:
            reports.append(json.loads(result.stdout))
        return result

    asyncio.run(probe(Answering(keep)))
    (report,) = reports
    assert set(report["results"].values()) == {None}
    named = calls(architecture(), NETWORK, SHARING, DANGEROUS)
    assert {f"system call {name}" for name in named} <= set(report["results"])
    assert not {f"system call {name}" for name in allowed(architecture())} & set(report["results"])
