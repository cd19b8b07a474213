"""What a long run tells Python's collector and the C library about its memory.

Memory that one training step frees is what the next one needs. glibc gives freed memory back to the system as soon as
enough of it lies at the heap's end, and the next step then takes thousands of page faults to have it again: 2 to 8
thousand a step of a tiny model on CPU, 15 ms and more.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
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


def freeze_objects() -> None:
    """Leave all objects that exist now out of full collections, until `gc.unfreeze`.

    Models and libraries are a million objects that live as long as the run; walking them takes 0.1 s and more. At exit
    they are collected again, since some libraries report what is not.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    atexit.unregister(gc.unfreeze)
    atexit.register(gc.unfreeze)
