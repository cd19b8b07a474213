"""What a long run tells Python's collector, the C library and torch's allocator about its memory."""

import ctypes
import os
import platform

import torch

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h
_MMAP_MOST = 2**25  # that glibc accepts


def keep_freed_memory() -> None:
    """Let the process keep up to 1 GiB of freed memory. Does nothing where the C library is not glibc."""
    if platform.libc_ver()[0] != "glibc":
        return
    library = ctypes.CDLL(None)
    library.mallopt(_TRIM_THRESHOLD, 2**30)
    library.mallopt(_MMAP_THRESHOLD, _MMAP_MOST)


_shared: list[bool] = []
"""Not empty where training and generation take turns with the memory that this process holds of its GPU."""


def share_gpu_memory() -> None:
    """Let what training frees be what generation needs, and the other way round, where one process does both.

    torch keeps freed memory in blocks of the sizes that were asked for, and a key-value cache fits none of a training
    step's: 112 GiB where 90 are in use. Expandable segments join neighbours.
    """
    settings = {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"} & os.environ.keys()
    if torch.cuda.is_available() and not settings:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
        _shared.append(True)


def release_gpu_memory() -> None:
    """Give freed memory back to the driver, for other processes or sizes, unless `share_gpu_memory` was called."""
    if not _shared:
        torch.cuda.empty_cache()
