"""Freed memory stays with the process: in a process of its own, since allocators have a past."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys
import numpy as np
from nemotron_steps.engine.policy.malloc_tuning import keep_freed_memory

if sys.argv[1] == "kept":
    keep_freed_memory()

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    arrays = [np.ones(2**19) for _ in range(8)]  # 4 MiB each
    del arrays
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults()
print(sum(faults() for _ in range(3)))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library frees as it likes")
def test_what_is_freed_is_there_again():
    faults = {
        how: int(subprocess.run([sys.executable, "-c", PROGRAM, how], capture_output=True, check=True).stdout)
        for how in ("kept", "given_back")
    }
    assert faults["kept"] < faults["given_back"] / 10
