"""What a long run tells the C library and torch's allocator about its memory.

Memory that one training step frees is what the next one needs. glibc gives freed memory back to the system as soon as
enough of it lies at the heap's end, and the next step then takes thousands of page faults to have it again: 2 to 8
thousand a step of a tiny model on CPU, 15 ms and more.
"""

from __future__ import annotations

import ctypes
import os
import platform

import torch

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


class _Phases:
    """Whether training and generation take turns with the memory that this process holds of its GPU."""

    share = False


def share_gpu_memory() -> None:
    """Let what training frees be what generation needs, and the other way round, where one process does both.

    torch keeps freed memory in blocks of the sizes that were asked for, and a key-value cache fits none of a training
    step's. Expandable segments join neighbours. Without them the memory has to go back to the driver between phases,
    and what cannot, because something small lies in it, is lost: 112 GiB where 90 are in use.
    Does nothing without CUDA, or where PYTORCH_CUDA_ALLOC_CONF or PYTORCH_ALLOC_CONF says what is wanted.
    """
    settings = {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"} & os.environ.keys()
    if torch.cuda.is_available() and not settings:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
        _Phases.share = True


def release_gpu_memory() -> None:
    """Give freed memory back to the driver, for other processes or sizes, unless `share_gpu_memory` was called."""
    if not _Phases.share:
        torch.cuda.empty_cache()
