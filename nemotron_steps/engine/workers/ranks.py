"""The ranks of one torch.distributed world, an actor each: a policy's, or a teacher's of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nemotron_steps.engine.workers.rendezvous import join_store, serve_store
from nemotron_steps.engine.workers.workers import (
    START_SECONDS,
    Worker,
    WorkerProcess,
    result_of,
    settle,
    start_workers,
    stop_workers,
)


class RankWorker(WorkerProcess):
    """One rank, inside an actor. Methods are called on all ranks in the same order."""

    def serve_store(self, host: str) -> int:
        """Rank 0: serve the store that the ranks meet at; returns its port."""
        self._served, port = serve_store(host)
        return port

    def join(self, rank: int, ranks: int, host: str, port: int) -> None:
        """Become a rank of torch.distributed's world."""
        import torch
        import torch.distributed as dist

        self._rank, self._address = rank, (host, port)
        store = dist.PrefixStore("ranks", join_store(host, port))  # type: ignore[attr-defined]
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=ranks)

    def _answer(self, value: Any) -> Any:
        """What rank 0 answers; the others answer nothing."""
        return value if self._rank == 0 else None


class RankGroup:
    """The ranks, from the process that asks them."""

    def __init__(
        self, name: str, process: type[RankWorker], options: Sequence[Mapping[str, Any]], *, local: bool
    ) -> None:
        names = [f"{name} rank {rank}" for rank in range(len(options))]
        self.workers: list[Worker] = start_workers(process, names, options)
        first = self.workers[0]
        host = "127.0.0.1" if local else first.host
        self.address = (host, int(result_of(first.call("serve_store", host), first, timeout_s=START_SECONDS)))
        ranks = len(self.workers)
        settle({worker.call("join", rank, ranks, *self.address): worker for rank, worker in enumerate(self.workers)})

    def calls(self, method: str, *arguments: Any) -> dict[Any, Worker]:
        """Start a method on every rank: for `settle`, whose first result is rank 0's."""
        return {worker.call(method, *arguments): worker for worker in self.workers}

    def everywhere(self, method: str, *arguments: Any) -> Any:
        """Rank 0's answer, once all ranks have one."""
        return settle(self.calls(method, *arguments))[0]

    def close(self) -> None:
        """End the ranks."""
        stop_workers(self.workers)
