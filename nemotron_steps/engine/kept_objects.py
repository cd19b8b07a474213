"""What a run tells Python's collector of objects."""

from __future__ import annotations

import atexit
import gc


def free_left_gpu_memory() -> None:
    """Free what an earlier run of this process left on its GPU, in objects that only the collector frees."""
    import torch

    if torch.cuda.is_available():
        gc.collect()


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
