"""TCPStores whose port is bound before anyone hears of it, so that no other process can take it in between."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import TYPE_CHECKING

from nemotron_steps.errors import EngineError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore


def bind_port(host: str) -> socket.socket:
    """A socket bound to a free port of one address."""
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        bound.bind((host, 0))
    except OSError as error:
        bound.close()
        raise EngineError("no port could be bound", where=host, found=str(error)) from error
    return bound


def serve_store(host: str) -> tuple[TCPStore, int]:
    """A store served by this process on one address, and its port."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    bound = bind_port(host)
    port = int(bound.getsockname()[1])
    store = TCPStore(
        host, port, None, is_master=True, wait_for_workers=False, master_listen_fd=bound.detach(), use_libuv=True
    )
    return store, port


def join_store(host: str, port: int, timeout_s: float = 60.0) -> TCPStore:
    """A connection to a store that another process serves; torch retries until the timeout."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    return TCPStore(host, port, None, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
