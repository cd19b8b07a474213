"""What the tests that run programs in the sandbox share."""

import asyncio
import functools
import platform
from contextlib import suppress
from pathlib import Path

import pytest

from nemotron_steps.sandbox import Limits, SandboxResult
from nemotron_steps.sandbox.bubblewrap import BubblewrapSandbox
from nemotron_steps.sandbox.seccomp import BY_ARGUMENT, DANGEROUS, HARMLESS, NETWORK, SHARING, calls

MIB = 2**20
NUMBERS = calls(platform.machine(), HARMLESS, BY_ARGUMENT, NETWORK, SHARING, DANGEROUS)

PRELUDE = f"""
import ctypes, errno, mmap, os, resource, signal, socket, struct, sys, time
N = {NUMBERS!r}
libc = ctypes.CDLL(None, use_errno=True)

def text(value):
    return ctypes.create_string_buffer(value)

def call(name, *arguments):
    ctypes.set_errno(0)
    words = [a if isinstance(a, ctypes.Array) else ctypes.c_long(a) for a in arguments]
    answer = libc.syscall(ctypes.c_long(N[name]), *words)
    return answer if answer != -1 else -ctypes.get_errno()

def refused(answer):
    if answer not in (-errno.ENOSYS, -errno.EPERM, -errno.EACCES, -errno.EAFNOSUPPORT):
        print("ESCAPED", answer)
"""


@functools.cache
def started() -> BubblewrapSandbox:
    """One sandbox for all tests that need no other: it probes once."""
    sandbox = BubblewrapSandbox()
    asyncio.run(sandbox.start())
    return sandbox


def run(code: str, *, limits: Limits | None = None, sandbox: BubblewrapSandbox | None = None) -> SandboxResult:
    """A Python program after PRELUDE."""
    return asyncio.run((sandbox or started()).run(code=PRELUDE + code, limits=limits))


def with_argument(text: str) -> list[int]:
    """Processes of this host with a text in their command line."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if text.encode() in (process / "cmdline").read_bytes():
                found.append(int(process.name))
    return found


def sections(text: str) -> list[object]:
    """Parameters of a test: programs, each below a line `# its name`."""
    found = []
    for section in text.strip().removeprefix("# ").split("\n# "):
        name, _, code = section.partition("\n")
        found.append(pytest.param(code, id=name))
    return found
