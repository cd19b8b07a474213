"""The one door through which megatron-core is imported, and the process group it needs even on one rank.

megatron-core assumes a CUDA machine and pulls in packages this project does not use through it. Importing it here
first keeps the import about three times shorter and lets the same modules build on a CPU.
"""

from __future__ import annotations

import atexit
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from nemotron_steps.errors import UnsupportedError

_loaded = False


def load_megatron_core() -> None:
    """Import megatron-core. Idempotent; UnsupportedError when it is not installed.

    While it is being imported, wandb and Transformer Engine are hidden (only loggers and layers of its own, which
    nothing here uses, need them, and a Transformer Engine built for another torch or CUDA ends its import) and
    `torch.compile` decorates nothing: compiling the handful of functions it marks pulls in the whole inductor, and this
    project calls its own versions of the ones that matter.
    """
    global _loaded
    if _loaded:
        return
    import torch

    hidden = {name: sys.modules.get(name) for name in ("wandb", "transformer_engine")}
    compile_function = torch.compile

    def leave_uncompiled(function: Callable[..., Any] | None = None, **_: object) -> Any:
        return function if function is not None else (lambda inner: inner)

    try:
        sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
        torch.compile = leave_uncompiled  # type: ignore[assignment]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns about Apex and Transformer Engine, which it does without
            import megatron.core.dist_checkpointing
            import megatron.core.models.gpt
            import megatron.core.transformer.attention  # noqa: F401  it would look for Transformer Engine later
    except ImportError as error:
        raise UnsupportedError(
            "megatron-core cannot be imported", found=str(error), hints=("pip install 'megatron-core>=0.16.1,<0.17'",)
        ) from error
    finally:
        torch.compile = compile_function
        for name, module in hidden.items():
            if module is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module
    _loaded = True


@contextmanager
def on_available_device() -> Iterator[None]:
    """Make `torch.cuda.current_device()` and `synchronize()` answer for the CPU where there is no CUDA.

    megatron-core asks them when it allocates communication buffers and closes checkpoints. Where CUDA is available
    this does nothing.
    """
    import torch

    if torch.cuda.is_available():
        yield
        return
    current_device, synchronize = torch.cuda.current_device, torch.cuda.synchronize
    cpu = torch.device("cpu")
    torch.cuda.current_device = lambda: cpu  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda *_, **__: None  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.cuda.current_device, torch.cuda.synchronize = current_device, synchronize


def ensure_process_group() -> None:
    """Initialise torch.distributed unless it already is, as ranks of a group have done (workers/workers.py).

    A group of this process alone, over an in-memory store: no port is opened, and variables of a launcher that the
    process inherited say nothing. The process leaves it as it ends, or NCCL warns of it.
    """
    import torch
    import torch.distributed as dist

    if dist.is_initialized():
        return
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    atexit.register(_leave_process_group)


def _leave_process_group() -> None:
    import torch.distributed as dist

    with suppress(RuntimeError):  # of a GPU that failed, which has been reported
        if dist.is_initialized():
            dist.destroy_process_group()
