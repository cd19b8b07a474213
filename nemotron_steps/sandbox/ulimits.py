"""Limits that Podman has to be told, because what it takes by itself may be more than this process may grant.

As root it asks for 1,048,576 files and as many processes. Root without CAP_SYS_RESOURCE, as in many containers and
virtual machines, may not raise a limit above its own, and no container starts. Docker's daemon asks for nothing.
"""

from __future__ import annotations

import resource
from pathlib import Path

_DEFAULT = 1_048_576


def podman_ulimits(*, nofile: int = _DEFAULT) -> list[str]:
    """Arguments of `podman run`: as many files as told and processes as there may be, never above this process's own
    hard limits.

    nproc counts all processes of a user on the machine, so it bounds no single container: `--pids-limit` does. Podman
    has lowered its own to the kernel's number of process numbers by the time it starts a container.
    """
    limits = {
        "nofile": (resource.RLIMIT_NOFILE, nofile),
        "nproc": (resource.RLIMIT_NPROC, int(Path("/proc/sys/kernel/pid_max").read_text())),
    }
    words = []
    for name, (number, value) in limits.items():
        hard = resource.getrlimit(number)[1]
        bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
        words += ["--ulimit", f"{name}={bound}:{bound}"]
    return words
