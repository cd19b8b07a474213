"""What the start-up probe runs inside: a program that tries to get out, and says what it reached.

It is never imported. It gets a JSON object on standard input (`probe.py` builds it) and prints one: attempt → null if
it was refused, else what was reached. An attempt that could not be made counts as reached, because it proves nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import json
import mmap
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

LIBC = ctypes.CDLL(None, use_errno=True)
REFUSALS = (errno.ENOSYS, errno.EPERM, errno.EACCES)
SHORTAGES = (errno.EAGAIN, errno.EMFILE, errno.ENFILE)
HIGHEST_CALL = 600
KILLS_ITS_CALLER = {"x86_64": {335, 336}, "aarch64": set[int]()}
"""uretprobe and uprobe, where there is no filter."""
X32_BIT = 0x4000_0000
INT_80_GETPID = b"\xb8\x14\x00\x00\x00\xcd\x80\xc3"  # mov eax, 20; int 0x80; ret
NAMESPACES = {
    "user": 0x1000_0000,
    "mount": 0x0002_0000,
    "cgroup": 0x0200_0000,
    "uts": 0x0400_0000,
    "ipc": 0x0800_0000,
    "pid": 0x2000_0000,
    "network": 0x4000_0000,
}
MAP_HUGETLB = 0x4_0000
SESSION_KEYRING = -3
KEPT: list[bytearray] = []
results: dict[str, str | None] = {}


def attempt(name: str, action: Callable[[], Any]) -> None:
    """Make one; an OSError or MemoryError is a refusal, unless it says that something else was short."""
    try:
        reached = action()
    except MemoryError:
        results[name] = None
    except OSError as error:
        results[name] = f"could not be tried: {error!r}" if error.errno in SHORTAGES else None
    except Exception as error:
        results[name] = f"could not be tried: {error!r}"
    else:
        results[name] = str(reached)[:200] if reached else None


def system_call(number: int, *arguments: int) -> int:
    """Its error number, 0 where there was none."""
    ctypes.set_errno(0)
    words = [ctypes.c_long(argument) for argument in (*arguments, -1, -1, -1, -1, -1, -1)[:6]]
    failed = LIBC.syscall(ctypes.c_long(number), *words) == -1
    return ctypes.get_errno() if failed else 0


def every_refused_call(machine: str, allowed: list[int], names: dict[str, str], answers: dict[str, int]) -> None:
    """Every call that is not on the list. `answers`: the filter's own errors, by number."""
    for number in sorted(set(range(HIGHEST_CALL)) - set(allowed) - KILLS_ITS_CALLER[machine]):
        error = system_call(number)
        refused = error == answers.get(str(number)) or error in REFUSALS
        if not refused or str(number) in names:
            reached = None if refused else f"the kernel answers {errno.errorcode.get(error, 'done')}"
            results[f"system call {names.get(str(number), number)}"] = reached
    if machine == "x86_64":
        # By the interface with 32-bit pointers. Engines' filters kill for it.
        attempt("system calls of x32", lambda: in_a_child(lambda: system_call(X32_BIT | 39) == 0) and "getpid answers")
        attempt("system calls of 32 bits", lambda: in_a_child(call_32_bits) and "getpid answers")


def in_a_child(action: Callable[[], bool]) -> bool:
    """Whether it was done; a child that dies of it did not do it."""
    child = os.fork()
    if child == 0:
        done = False
        with contextlib.suppress(Exception):
            done = action()
        os._exit(42 if done else 0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42


def call_32_bits() -> bool:
    """By the old interrupt, for which the same numbers mean other calls."""
    flags, access = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC
    page = mmap.mmap(-1, 4096, flags=flags, prot=access)
    page.write(INT_80_GETPID)
    return bool(ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))() > 0)


def new_namespace(clone: int, flags: int) -> str | None:
    """A process in a namespace of its own."""
    child = LIBC.syscall(ctypes.c_long(clone), ctypes.c_long(flags | signal.SIGCHLD), *[ctypes.c_long(0)] * 4)
    if child == 0:
        os._exit(0)
    if child < 0:
        raise OSError(ctypes.get_errno(), "clone")
    os.waitpid(child, 0)
    return "made"


def families(make: Callable[[int, int], Any], but: tuple[int, ...]) -> list[int]:
    """Socket families that can be created; none is connected."""
    made = set()
    kinds = (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW, socket.SOCK_SEQPACKET)
    for family, kind in itertools.product(set(range(1, 46)) - set(but), kinds):
        with contextlib.suppress(OSError):
            make(family, kind)
            made.add(family)
    return sorted(made)


def connect(port: int) -> str:
    """To the listener that the probe opened on the host's loopback."""
    with socket.create_connection(("127.0.0.1", port), timeout=1):
        return f"connected to the host's port {port}"


def connect_by_name(name: str) -> str:
    """To the socket without a file that the probe opened on the host."""
    with socket.socket(socket.AF_UNIX) as client:
        client.connect("\0" + name)
    return "connected"


def interfaces() -> list[str]:
    """Other than the loopback."""
    with open("/proc/self/net/dev") as table:
        return [line.split(":")[0].strip() for line in table if ":" in line and line.split(":")[0].strip() != "lo"]


def read(path: str) -> str | None:
    """Its first bytes, if there are any but zeros: a file is hidden by an empty one, an address in the kernel by 0."""
    with open(path, "rb") as handle:
        found = handle.read(16)
    return repr(found) if found.strip(b"0") else None


def write(path: str) -> str:
    """Where nothing should be writable."""
    with open(path, "w") as handle:
        handle.write("x")
    return f"wrote {path}"


def overfill(folder: str, mebibytes: int) -> str:
    """More than fits."""
    try:
        for number in range(mebibytes + 2):
            with open(f"{folder}/fill-{number}", "wb") as handle:
                handle.write(b"x" * 2**20)
    finally:
        for number in range(mebibytes + 2):
            with contextlib.suppress(OSError):
                os.unlink(f"{folder}/fill-{number}")
    return f"{mebibytes + 2} MiB"


def hold(size: int) -> bool:
    """In one process, from now on."""
    KEPT.append(bytearray(size))
    KEPT[-1][::4096] = b"x" * len(KEPT[-1][::4096])
    return True


def mapped(descriptor: int, flags: int) -> str:
    """Memory that does not count as a process's own."""
    mmap.mmap(descriptor, 2**21, flags=flags).write(b"x")
    return "mapped"


def shared_memory() -> str:
    """The folder of POSIX shared memory."""
    path = f"/dev/shm/probe-{os.getpid()}"
    write(path)
    os.unlink(path)
    return "a file"


def status(*wanted: str) -> str | None:
    """Fields of /proc/self/status that are not `Name:value` as wanted."""
    with open("/proc/self/status") as handle:
        fields = {line.split(":")[0]: line.split(":")[1].strip() for line in handle}
    other = [
        f"{name} {fields.get(name)}"
        for name, _, value in (w.partition(":") for w in wanted)
        if fields.get(name) != value
    ]
    return ", ".join(other) or None


def descriptors() -> list[int]:
    """Open ones beyond the standard three."""
    return [number for number in range(3, 4096) if os.path.lexists(f"/proc/self/fd/{number}")]


def core_limit() -> str | None:
    """A core limit at which a crash would start the host's crash handler."""
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    limit = resource.getrlimit(resource.RLIMIT_CORE)
    return None if limit == (1, 1) else str(limit)


def fork_until_refused(limit: int) -> str | None:
    """Children that are left running: the sandbox has to end them."""
    children = 0
    with contextlib.suppress(OSError):
        for _ in range(limit * 2):
            if os.fork() == 0:
                time.sleep(30)
                os._exit(0)
            children += 1
    return f"{children} processes under a limit of {limit}" if children >= limit else None


def hold_together(size: int) -> int:
    """How many of three processes hold memory at the same time; the sandbox ends all of them, or the kernel some."""
    children = []
    for _ in range(2):
        child = os.fork()
        if child == 0:
            hold(size)
            time.sleep(5)
            os._exit(0)
        children.append(child)
    hold(size)
    time.sleep(4)  # on a machine that is busy, whoever counts memory comes late
    return 1 + sum(os.waitpid(child, os.WNOHANG)[0] == 0 for child in children)


def main() -> None:
    """Make all attempts."""
    host = json.loads(sys.stdin.read())
    if "together" in host:
        print(hold_together(host["together"]), flush=True)
        os._exit(0)
    attempt("descriptors of the host", descriptors)
    attempt("network: host loopback", lambda: connect(host["port"]))
    attempt("network: interfaces", interfaces)
    attempt("network: host unix socket", partial(connect_by_name, host["secret"]))
    attempt("network: socket families", lambda: families(socket.socket, ()))
    attempt("network: pairs of sockets", lambda: families(socket.socketpair, (socket.AF_UNIX,)))
    for path in host["files"]:
        attempt(f"host file {path}", partial(read, path))
    for path in host["paths"]:
        attempt(f"host path {path}", partial(os.path.lexists, path))
    for path in ("/proc/keys", "/proc/kcore", "/proc/kmsg", "/proc/kallsyms"):
        attempt(f"kernel file {path}", partial(read, path))
    attempt("environment", lambda: [name for name, value in os.environ.items() if value == host["secret"]])
    python = os.path.dirname(os.path.realpath(sys.executable))
    for folder in ("/usr", "/bin", "/lib", "/", "/dev", "/proc/sys/kernel", python):
        attempt(f"write to {folder}", partial(write, f"{folder}/sandbox-probe"))
    attempt(
        "host process",
        lambda: host["cmdline"] == Path(f"/proc/{host['pid']}/cmdline").read_text(errors="replace") and "in sight",
    )
    attempt("privileges: user id", lambda: os.geteuid() == 0 and "runs as root")
    none = "0000000000000000"
    attempt("privileges: capabilities", lambda: status(*(f"Cap{kind}:{none}" for kind in ("Inh", "Prm", "Eff", "Amb"))))
    attempt("privileges: set-user-id programs", lambda: status("NoNewPrivs:1"))
    attempt("privileges: core dumps", core_limit)
    attempt("scratch size", lambda: overfill(".", host["scratch_mib"]))
    attempt("temporary size", lambda: overfill("/tmp", host["scratch_mib"]))
    # Where no limit of address space refuses it, the kernel may kill for it.
    attempt("memory: one process", lambda: in_a_child(partial(hold, host["memory"])) and "held")
    if host["hidden_memory"]:
        anonymous = mmap.MAP_ANONYMOUS
        attempt("memory: shared", lambda: mapped(-1, mmap.MAP_SHARED | anonymous))
        attempt("memory: huge pages", lambda: mapped(-1, mmap.MAP_PRIVATE | anonymous | MAP_HUGETLB))
        attempt("memory: /dev/zero", lambda: mapped(os.open("/dev/zero", os.O_RDWR), mmap.MAP_SHARED))
        attempt("memory: /dev/shm", shared_memory)
    for name, flag in NAMESPACES.items():
        attempt(f"namespace: {name}", partial(new_namespace, host["clone"], flag | NAMESPACES["user"]))
    every_refused_call(host["machine"], host["allowed"], host["names"], host["answers"])
    attempt(
        "kernel keyring", lambda: system_call(host["keyctl"], 0, SESSION_KEYRING, 0) == 0 and "has a session keyring"
    )
    attempt("fork bomb", lambda: fork_until_refused(host["processes"]))
    print(json.dumps({"secret": host["secret"], "results": results}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
