import errno
import platform
import re
import struct
from pathlib import Path

import pytest

from nemotron_steps.errors import UnsupportedError
from nemotron_steps.sandbox import seccomp
from nemotron_steps.sandbox.seccomp import (
    ATTRIBUTES,
    BY_ARGUMENT,
    DANGEROUS,
    GROUPS,
    HARMLESS,
    NETWORK,
    SHARING,
    calls,
)

MACHINES = ("x86_64", "aarch64")
ALLOWED = 0x7FFF0000
I386 = 0x40000003


def decide(program: bytes, number: int, *arguments: int, architecture: int) -> int:
    """What the kernel would return: an interpreter of the few operations that the filter is made of."""
    words = [argument & (2**64 - 1) for argument in (*arguments, 0, 0, 0, 0, 0, 0)[:6]]
    data = struct.pack("<iIQ6Q", number, architecture, 0, *words)
    code = [struct.unpack("<HBBI", program[at : at + 8]) for at in range(0, len(program), 8)]
    at, loaded = 0, 0
    while True:
        operation, then, otherwise, operand = code[at]
        at += 1
        if operation == 0x06:
            return operand
        if operation == 0x20:
            (loaded,) = struct.unpack_from("<I", data, operand)
        elif operation == 0x54:
            loaded &= operand
        else:
            true = {0x15: loaded == operand, 0x35: loaded >= operand, 0x45: bool(loaded & operand)}[operation]
            at += then if true else otherwise


def call(machine: str, name: str, *arguments: int) -> int | str:
    """`allowed` or the error number."""
    number = calls(machine, HARMLESS, BY_ARGUMENT, NETWORK, ATTRIBUTES, SHARING, DANGEROUS)[name]
    answer = decide(seccomp.filter_program(machine), number, *arguments, architecture=seccomp.AUDIT_ARCH[machine])
    return "allowed" if answer == ALLOWED else answer & 0xFFFF


@pytest.mark.parametrize("machine", MACHINES)
def test_every_number_is_refused_but_those_on_the_list(machine: str) -> None:
    program, architecture = seccomp.filter_program(machine), seccomp.AUDIT_ARCH[machine]
    wrong = -1
    through = {
        number for number in range(2048) if decide(program, number, *[wrong] * 6, architecture=architecture) == ALLOWED
    }
    assert through <= set(seccomp.allowed(machine).values())
    assert set(calls(machine, HARMLESS).values()) <= through


@pytest.mark.parametrize("machine", MACHINES)
def test_a_call_of_another_architecture_is_refused_even_where_the_number_is_allowed(machine: str) -> None:
    number = calls(machine, HARMLESS)["read"]
    other = next(seccomp.AUDIT_ARCH[name] for name in MACHINES if name != machine)
    for architecture in (I386, other, 0):
        answer = decide(seccomp.filter_program(machine), number, architecture=architecture)
        assert answer == 0x50000 | errno.ENOSYS


def test_the_x32_interface_is_refused() -> None:
    program, architecture = seccomp.filter_program("x86_64"), seccomp.AUDIT_ARCH["x86_64"]
    for number in calls("x86_64", HARMLESS).values():
        assert decide(program, number | 0x40000000, architecture=architecture) == 0x50000 | errno.ENOSYS


RULES = [  # what the filter answers, and what an engine's does
    ("read", (0,), "allowed", "allowed"),
    ("clone", (0x11,), "allowed", "allowed"),
    ("clone", (0x003D0F00,), "allowed", "allowed"),  # a thread
    ("clone", (0x10000011,), errno.EPERM, errno.ENOSYS),  # a user namespace
    ("clone", (0x80,), errno.EPERM, errno.ENOSYS),  # a time namespace
    ("mmap", (0, 4096, 3, 0x22, -1, 0), "allowed", "allowed"),  # private anonymous
    ("mmap", (0, 4096, 3, 0x01, 5, 0), "allowed", "allowed"),  # a shared file
    ("mmap", (0, 4096, 3, 0x21, -1, 0), errno.EPERM, "allowed"),  # which the engine's cgroup counts
    ("mmap", (0, 4096, 3, 0x23, -1, 0), errno.EPERM, "allowed"),  # MAP_SHARED_VALIDATE
    ("mmap", (0, 4096, 3, 0x40022, -1, 0), errno.EPERM, "allowed"),  # huge pages
    ("socketpair", (1, 1, 0, 0), "allowed", "allowed"),
    ("socketpair", (2, 1, 0, 0), errno.EAFNOSUPPORT, errno.ENOSYS),
    ("socket", (1, 1, 0), errno.EAFNOSUPPORT, errno.EAFNOSUPPORT),
    ("socket", (40, 1, 0), errno.EAFNOSUPPORT, errno.EAFNOSUPPORT),
    ("ioctl", (0x5412, 0x5401), "allowed", "allowed"),
    ("ioctl", (0x5401, 0x5412), errno.ENOTTY, errno.ENOSYS),  # TIOCSTI
    ("ioctl", (0, 0x1_0000_5412), errno.ENOTTY, errno.ENOSYS),  # the kernel takes 32 bits of it
    ("prctl", (15,), "allowed", "allowed"),
    ("prctl", (35,), errno.EINVAL, errno.ENOSYS),  # PR_SET_MM
    ("fcntl", (1031, 1), "allowed", "allowed"),
    ("fcntl", (0, 1031), errno.EPERM, errno.ENOSYS),
    ("setrlimit", (4, 1), 0, 0),
    ("setrlimit", (7, 1), "allowed", "allowed"),
    ("prlimit64", (0, 4, 0, 1), "allowed", "allowed"),
    ("prlimit64", (0, 4, 1, 0), 0, 0),
    ("prlimit64", (0, 4, 0x1_0000_0000, 0), 0, 0),  # a pointer whose lower half is 0
    ("prlimit64", (0, 7, 1, 0), "allowed", "allowed"),
    ("setxattr", (), errno.EOPNOTSUPP, errno.EOPNOTSUPP),
    ("clone3", (), errno.ENOSYS, errno.ENOSYS),
    ("keyctl", (), errno.ENOSYS, errno.ENOSYS),
]


@pytest.mark.parametrize(("name", "arguments", "filtered", "contained"), RULES)
def test_rules_by_argument(name: str, arguments: tuple[int, ...], filtered: int | str, contained: int | str) -> None:
    assert [call(machine, name, *arguments) for machine in MACHINES] == [filtered] * 2
    assert in_container(name, *arguments) == contained and in_container("of_tomorrow") == errno.ENOSYS


@pytest.mark.parametrize(
    ("machine", "header"),
    [
        ("x86_64", "/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
        ("aarch64", "/usr/include/asm-generic/unistd.h"),
    ],
)
def test_numbers_are_those_of_the_kernel_headers(machine: str, header: str) -> None:
    if not Path(header).exists():
        pytest.skip("no kernel headers on this machine")
    found = re.findall(r"^#define __NR(?:3264)?_(\w+)\s+(\d+)$", Path(header).read_text(), re.MULTILINE)
    defined = {"newfstatat" if name == "fstatat" else name: int(number) for name, number in found}
    ours = calls(machine, HARMLESS, BY_ARGUMENT, NETWORK, ATTRIBUTES, SHARING, DANGEROUS)
    checked = {name: number for name, number in ours.items() if name in defined}
    assert checked == {name: defined[name] for name in checked}
    assert len(checked) >= len(ours) - 3  # calls that are newer than the headers


def test_an_unknown_architecture_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(UnsupportedError) as caught:
        seccomp.architecture()
    assert caught.value.found == "riscv64"


@pytest.mark.parametrize("session", [False, True])
def test_the_containers_profile_allows_no_more_than_it_says(session: bool) -> None:
    profile = seccomp.container_profile(session=session)
    always = [rule for rule in profile["syscalls"] if "args" not in rule]
    freely = {name for rule in always if rule["action"] == "SCMP_ACT_ALLOW" for name in rule["names"]}
    assert profile["defaultAction"] == "SCMP_ACT_ERRNO"
    assert not freely & {name for machine in MACHINES for name in calls(machine, DANGEROUS)}
    assert not freely & {"clone", "socket", "prlimit64", "fcntl"}
    assert ("memfd_create" in freely) == ("bind" in freely) == session
    judged = [rule for rule in profile["syscalls"] if "args" in rule]
    families = [rule["args"][0]["value"] for rule in judged if rule["names"] == ["socket"]]
    assert families == ([1, 2, 10] if session else [])


@pytest.mark.parametrize("session", [False, True])
def test_the_containers_profile_says_of_every_known_call_how_it_is_refused(session: bool) -> None:
    """An engine that knows no default but EPERM gives it for clone3, and libc does not fall back to clone."""
    rules = seccomp.container_profile(session=session)["syscalls"]
    told = {name for rule in rules for name in rule["names"]}
    assert told == {name for machine in MACHINES for name in calls(machine, *GROUPS)}
    refused = {
        name: rule["errnoRet"] for rule in rules if "args" not in rule for name in rule["names"] if "errnoRet" in rule
    }
    allowed = {name for rule in rules if rule["action"] == "SCMP_ACT_ALLOW" for name in rule["names"]}
    assert not allowed & set(refused), "an answer without a condition would stand before one with"
    assert refused["clone3"] == refused["keyctl"] == errno.ENOSYS
    assert session or (refused["socket"], refused["setxattr"]) == (errno.EAFNOSUPPORT, errno.EOPNOTSUPP)


def in_container(name: str, *arguments: int, session: bool = False) -> int | str:
    """What an engine's filter answers: `allowed` or the error number."""
    holds = {
        "SCMP_CMP_EQ": lambda argument, value, two: argument == value,
        "SCMP_CMP_NE": lambda argument, value, two: argument != value,
        "SCMP_CMP_MASKED_EQ": lambda argument, value, two: argument & value == two,
    }
    profile = seccomp.container_profile(session=session)
    for rule in (rule for rule in profile["syscalls"] if name in rule["names"]):
        if all(holds[a["op"]](arguments[a["index"]], a["value"], a["valueTwo"]) for a in rule.get("args", ())):
            return "allowed" if rule["action"] == "SCMP_ACT_ALLOW" else rule["errnoRet"]
    assert profile["defaultAction"] == "SCMP_ACT_ERRNO"
    default: int = profile["defaultErrnoRet"]
    return default


def test_a_session_may_do_what_a_repositorys_tests_do_and_take_no_namespace() -> None:
    for name, arguments in (("ioctl", (0, 0x5412)), ("prctl", (35,)), ("socket", (10, 1)), ("memfd_create", ())):
        assert in_container(name, *arguments, session=True) == "allowed"
    assert in_container("clone", 0x10000011, session=True) == errno.ENOSYS
    assert in_container("socket", 40, session=True) == errno.ENOSYS  # vsock


@pytest.mark.parametrize(
    ("name", "place", "values"),
    [
        ("ioctl", 1, {0x5401, 0x540F, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451, 0x802C542A}),
        ("prctl", 0, {1, 2, 3, 4, 7, 8, 15, 16, 21, 23, 24, 27, 28, 38, 39, 41, 42, 47, 0x53564D41}),
        ("socketpair", 0, {1}),
    ],
)
def test_no_value_of_an_argument_is_allowed_but_those_that_are_documented(
    name: str, place: int, values: set[int]
) -> None:
    tried = {*values, *(value + 1 for value in values), 0, 0x5412, 0x541C, 35, 59}
    allowed = {value for value in tried if call("x86_64", name, *[0] * place, value) == "allowed"}
    assert allowed == {value for value in tried if in_container(name, *[0] * place, value) == "allowed"} == values
