"""Memory that one training step frees is what the next one needs.

glibc gives freed memory back to the system as soon as enough of it lies at the heap's end, and the next step then takes
thousands of page faults to have it again: 2 to 8 thousand a step of a tiny model on CPU, 15 ms and more.
"""

from __future__ import annotations

import ctypes
import platform

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h
_MMAP_MOST = 2**25
"""The most that glibc accepts."""


def keep_freed_memory() -> None:
    """Let the process keep up to 1 GiB of freed memory. Does nothing where the C library is not glibc."""
    if platform.libc_ver()[0] != "glibc":
        return
    library = ctypes.CDLL(None)
    library.mallopt(_TRIM_THRESHOLD, 2**30)
    library.mallopt(_MMAP_THRESHOLD, _MMAP_MOST)
