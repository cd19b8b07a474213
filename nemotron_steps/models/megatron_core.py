"""The one door through which megatron-core is imported, and the process group it needs even on one rank. megatron-core
assumes a CUDA machine and pulls in packages this project does not use through it. Importing it here first keeps the
import about three times shorter and lets the same modules build on a CPU."""

import atexit
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from nemotron_steps.errors import UnsupportedError

_loaded = False


def load_megatron_core() -> None:
    """Import megatron-core. Idempotent; UnsupportedError when it is not installed. Meanwhile wandb and Transformer
    Engine are hidden (nothing here uses what needs them, and a Transformer Engine built for another torch or CUDA ends
    the import) and `torch.compile` decorates nothing, or it pulls in the whole inductor."""
    global _loaded
    if _loaded:
        return
    import torch

    hidden = {name: sys.modules.get(name) for name in ("wandb", "transformer_engine")}
    compile_function = torch.compile
    try:
        sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
        torch.compile = lambda function=None, **_: function or (lambda inner: inner)  # type: ignore[assignment]
        with warnings.catch_warnings(action="ignore"):  # about Apex and Transformer Engine, which it does without
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
    """Make `torch.cuda.current_device()` and `synchronize()`, which megatron-core asks when it allocates communication
    buffers and closes checkpoints, answer for the CPU where there is no CUDA."""
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
    """Initialise torch.distributed unless it already is (workers/workers.py): a group of this process alone over an
    in-memory store, so that no port is opened and variables of a launcher say nothing."""
    import torch
    import torch.distributed as dist

    if dist.is_initialized():
        return
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]

    def leave() -> None:
        """As the process ends, or NCCL warns of it."""
        with suppress(RuntimeError):  # of a GPU that failed, which has been reported
            if dist.is_initialized():
                dist.destroy_process_group()

    atexit.register(leave)
