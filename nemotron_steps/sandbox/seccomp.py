"""The system calls that a sandboxed program may make, as a seccomp filter: an allow list. Everything else fails with
ENOSYS, as if the kernel had never had it, so that a libc that tries it goes on.

`filter_program` gives the classic BPF program that bubblewrap loads (`--seccomp FD`), `container_profile` the list as
the JSON that container engines take. What the rules by argument close:

| call | refused | because |
|---|---|---|
| clone | new namespaces | they bring mounts, tmpfs and more kernel to attack. clone3 has its flags in memory, where a filter cannot look: refused altogether, libc falls back to clone |
| mmap | shared anonymous and huge pages | memory that is held without being in a resident set |
| socketpair | all but AF_UNIX | other families are more kernel to attack, and some reach the host (vsock) |
| ioctl, prctl, fcntl | all but what libc and Python ask for | terminals, devices, larger pipes |
| setrlimit, prlimit64 | the core limit | bubblewrap.py sets it to 1, the one value at which no dump goes to a pipe |

References: Documentation/userspace-api/seccomp_filter.rst, include/uapi/linux/{seccomp,filter,audit}.h.
"""  # noqa: E501

from __future__ import annotations

import errno
import platform
import struct
from collections.abc import Sequence
from typing import Any

from nemotron_steps.errors import UnsupportedError
from nemotron_steps.sandbox.syscalls import (
    ATTRIBUTES,
    BY_ARGUMENT,
    DANGEROUS,
    GROUPS,
    HARMLESS,
    NETWORK,
    SHARING,
    calls,
)

AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
X32_BIT = 0x4000_0000

CLONE_NAMESPACES = 0x7E02_0080
"""CLONE_NEW{TIME,NS,CGROUP,UTS,IPC,USER,PID,NET}."""
MAP_SHARED_ANONYMOUS = 0x21
MAP_HUGETLB = 0x4_0000
AF_UNIX = 1
AF_INET = 2
AF_INET6 = 10
RLIMIT_CORE = 4
F_SETPIPE_SZ = 1031
PRCTL_OPTIONS = (1, 2, 3, 4, 7, 8, 15, 16, 21, 23, 24, 27, 28, 38, 39, 41, 42, 47, 0x53564D41)
"""Death signal, dumpable, keep-caps, name, seccomp's state, the bounding set and secure bits (setpriv reads and drops
them), no-new-privileges, huge pages, ambient capabilities, names of memory."""
IOCTL_REQUESTS = (0x5401, 0x540F, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451, 0x802C542A)
"""TCGETS, TIOCGPGRP, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX, TCGETS2."""

Instruction = tuple[int, int, int, int]
"""struct sock_filter: operation, instructions to skip if true and if false, operand."""

_LOAD, _AND, _EQUAL, _ANY_BIT, _AT_LEAST, _RETURN = 0x20, 0x54, 0x15, 0x45, 0x35, 0x06
# struct seccomp_data: int nr; u32 arch; u64 instruction_pointer; u64 args[6]. Little-endian on both architectures.
_NR, _ARCH, _ARGS = 0, 4, 16


def architecture() -> str:
    """This machine's.

    Raises:
        UnsupportedError: there is no filter for it.
    """
    machine = platform.machine()
    if machine not in AUDIT_ARCH:
        raise UnsupportedError(
            "the sandbox's system call filter is not written for this processor architecture",
            expected=" or ".join(AUDIT_ARCH),
            found=machine,
            hints=("run environments with model-written code on x86_64 or aarch64",),
        )
    return machine


def allowed(machine: str) -> dict[str, int]:
    """Name → number of the calls that may be made, whatever the arguments or with some."""
    return calls(machine, HARMLESS, BY_ARGUMENT)


def filter_program(machine: str, *, also: Sequence[str] = ()) -> bytes:
    """The filter as an array of struct sock_filter.

    Args:
        machine: x86_64 or aarch64.
        also: further calls to allow whatever their arguments, "*" for all: how tests show that the probe finds them.
    """
    code: list[Instruction] = [(_LOAD, 0, 0, _ARCH), (_EQUAL, 1, 0, AUDIT_ARCH[machine]), _fail(errno.ENOSYS)]
    code.append((_LOAD, 0, 0, _NR))
    if machine == "x86_64":
        # The x32 interface has the same architecture and calls of its own.
        code += [(_AT_LEAST, 0, 1, X32_BIT), _fail(errno.ENOSYS)]
    known = calls(machine, BY_ARGUMENT, NETWORK, ATTRIBUTES, SHARING, DANGEROUS)
    for number in (*calls(machine, HARMLESS).values(), *(known[name] for name in also if name != "*")):
        code += _on(number, [_allow()])
    for name, rule in _rules().items():
        if name in known:
            code += _on(known[name], rule)
    for number, error in refusals(machine).items():
        code += _on(number, [_fail(error)])
    code.append(_allow() if "*" in also else _fail(errno.ENOSYS))
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in code)


def refusals(machine: str) -> dict[int, int]:
    """Number → error of the calls that are refused with an error that their callers expect instead of ENOSYS."""
    numbers = calls(machine, NETWORK, ATTRIBUTES)
    return {numbers[name]: error for name, error in _refusals_by_name(machine).items()}


def _refusals_by_name(machine: str) -> dict[str, int]:
    return {"socket": errno.EAFNOSUPPORT, **dict.fromkeys(calls(machine, ATTRIBUTES), errno.EOPNOTSUPP)}


def _rules() -> dict[str, list[Instruction]]:
    """What to do on calls that are judged by their arguments."""
    return {
        "mmap": [
            _argument(3),
            (_ANY_BIT, 0, 1, MAP_HUGETLB),
            _fail(errno.EPERM),
            (_AND, 0, 0, MAP_SHARED_ANONYMOUS),
            *_refuse(MAP_SHARED_ANONYMOUS, errno.EPERM),
        ],
        "clone": [_argument(0), (_ANY_BIT, 0, 1, CLONE_NAMESPACES), _fail(errno.EPERM), _allow()],
        "socketpair": [_argument(0), *_only((AF_UNIX,), errno.EAFNOSUPPORT)],
        "ioctl": [_argument(1), *_only(IOCTL_REQUESTS, errno.ENOTTY)],
        "prctl": [_argument(0), *_only(PRCTL_OPTIONS, errno.EINVAL)],
        "fcntl": [_argument(1), *_refuse(F_SETPIPE_SZ, errno.EPERM)],
        # Accepted and not done: programs lower this limit to be tidy and take an error for a fault.
        "setrlimit": [_argument(0), *_refuse(RLIMIT_CORE, 0)],
        # Reading a limit passes no pointer to a new one, and both halves of a pointer count.
        "prlimit64": [
            _argument(1),
            (_EQUAL, 1, 0, RLIMIT_CORE),
            _allow(),
            _argument(2),
            (_EQUAL, 1, 0, 0),
            _fail(0),
            _argument(2, high=True),
            (_EQUAL, 1, 0, 0),
            _fail(0),
            _allow(),
        ],
    }


def _on(number: int, then: list[Instruction]) -> list[Instruction]:
    """`then`, which ends in a return, for one call; the number stays loaded for the others."""
    return [(_EQUAL, 0, len(then), number), *then]


def _only(values: Sequence[int], refusal: int) -> list[Instruction]:
    return [*(step for value in values for step in ((_EQUAL, 0, 1, value), _allow())), _fail(refusal)]


def _refuse(value: int, refusal: int) -> list[Instruction]:
    return [(_EQUAL, 0, 1, value), _fail(refusal), _allow()]


def _argument(index: int, *, high: bool = False) -> Instruction:
    # The kernel takes flags, families, requests and options as 32 bits: only of pointers does the upper half count.
    return (_LOAD, 0, 0, _ARGS + 8 * index + 4 * high)


def _allow() -> Instruction:
    return (_RETURN, 0, 0, 0x7FFF_0000)


def _fail(error: int) -> Instruction:
    return (_RETURN, 0, 0, 0x0005_0000 | error)


def container_profile(*, session: bool) -> dict[str, Any]:
    """The list for Docker, Podman and Apptainer (the OCI runtime's seccomp object, in Docker's JSON).

    Memory is the engine's cgroup's business, so what only hides memory is allowed. Every known call is named with its
    answer: Docker before 23 takes no default but EPERM, and with that for clone3 libc starts no thread.

    Args:
        session: a repository's own tests talk over sockets of their own network and share memory; one program does not.
    """
    machines = {"x86_64": "SCMP_ARCH_X86_64", "aarch64": "SCMP_ARCH_AARCH64"}
    groups = (HARMLESS, NETWORK, SHARING, ATTRIBUTES) if session else (HARMLESS,)
    names = {name for machine in machines for name in calls(machine, *groups)} - {"socket"}
    names |= {"mmap"} | ({"ioctl", "prctl"} if session else set())
    families = (AF_UNIX, AF_INET, AF_INET6) if session else ()
    values = {
        ("socket", 0): families,
        ("socketpair", 0): (AF_UNIX,),
        ("ioctl", 1): () if session else IOCTL_REQUESTS,
        ("prctl", 0): () if session else PRCTL_OPTIONS,
    }
    accepted = {"action": "SCMP_ACT_ERRNO", "errnoRet": 0}
    conditional = {"clone", "fcntl", "setrlimit", "prlimit64", *(name for (name, _), some in values.items() if some)}
    answers: dict[int, list[str]] = {}
    for name in {name for machine in machines for name in calls(machine, *GROUPS)} - names - conditional:
        answers.setdefault(_refusals_by_name("x86_64").get(name, errno.ENOSYS), []).append(name)
    return {
        "defaultAction": "SCMP_ACT_ERRNO",
        "defaultErrnoRet": errno.ENOSYS,
        "archMap": [{"architecture": name, "subArchitectures": []} for name in machines.values()],
        "syscalls": [
            {"names": sorted(names), "action": "SCMP_ACT_ALLOW"},
            *(
                {"names": sorted(refused), "action": "SCMP_ACT_ERRNO", "errnoRet": error}
                for error, refused in sorted(answers.items())
            ),
            _when("clone", (0, "SCMP_CMP_MASKED_EQ", CLONE_NAMESPACES)),
            _when("fcntl", (1, "SCMP_CMP_NE", F_SETPIPE_SZ)),
            *(_when(name, (at, "SCMP_CMP_EQ", value)) for (name, at), some in values.items() for value in some),
            _when("setrlimit", (0, "SCMP_CMP_NE", RLIMIT_CORE)),
            {**_when("setrlimit", (0, "SCMP_CMP_EQ", RLIMIT_CORE)), **accepted},
            _when("prlimit64", (1, "SCMP_CMP_NE", RLIMIT_CORE)),
            _when("prlimit64", (1, "SCMP_CMP_EQ", RLIMIT_CORE), (2, "SCMP_CMP_EQ", 0)),
            {**_when("prlimit64", (1, "SCMP_CMP_EQ", RLIMIT_CORE), (2, "SCMP_CMP_NE", 0)), **accepted},
        ],
    }


def _when(name: str, *conditions: tuple[int, str, int]) -> dict[str, Any]:
    # For MASKED_EQ `value` is the mask and `valueTwo` what must remain: nothing.
    args = [{"index": index, "op": op, "value": value, "valueTwo": 0} for index, op, value in conditions]
    return {"names": [name], "action": "SCMP_ACT_ALLOW", "args": args}
