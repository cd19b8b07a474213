"""The driver's side of a weight transfer: by which transport each generator gets its weights, and one update at a time.

Chosen by where the workers turned out to be: CUDA IPC from the rank on the generator's own GPU, else NCCL from rank 0;
on CPU gloo.
"""

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from nemotron_steps.engine.workers.workers import Worker, settle

GLOO, CUDA_IPC, NCCL = "gloo", "cuda_ipc", "nccl"


@dataclass(frozen=True)
class Receiver:
    """One process that weights go to: a generator, or one of its tensor-parallel workers."""

    name: str
    device: str | None = None

    @classmethod
    def of(cls, worker: Worker, processes: int) -> list["Receiver"]:
        """Those of a generation worker, in rank order; each has one of the worker's GPUs."""
        names = [worker.name] if processes == 1 else [f"{worker.name}/{rank}" for rank in range(processes)]
        devices = (*worker.devices, *[None] * processes)
        return [cls(name, device) for name, device in zip(names, devices, strict=False)]


class WeightTransfer:
    """The open transports from the ranks of one policy to the workers of one generator."""

    def __init__(
        self, ranks: Sequence[Worker], workers: Sequence[Worker], address: tuple[str, int], *, processes: int = 1
    ) -> None:
        self._ranks, self._workers = list(ranks), list(workers)
        channel = uuid.uuid4().hex
        receivers = [receiver for worker in workers for receiver in Receiver.of(worker, processes)]
        names = [receiver.name for receiver in receivers]
        self.transports = choose_transports(ranks, receivers)
        """Each receiver's (transport, sending rank)."""
        others = [name for name, (transport, _) in zip(names, self.transports, strict=True) if transport != CUDA_IPC]
        calls: dict[Any, Worker] = {}
        for number, rank in enumerate(self._ranks):
            ways = zip(names, self.transports, strict=True)
            ipc = [name for name, way in ways if way == (CUDA_IPC, number)]
            calls[rank.call("open_sender", channel, ipc, others if number == 0 else [])] = rank
        opened = settle(calls)
        offers = []
        for name, (transport, number) in zip(names, self.transports, strict=True):
            place = (1 + others.index(name), 1 + len(others)) if transport != CUDA_IPC else None
            offers.append(replace(opened[number], address=address, name=name, place=place))
        calls = {}
        for number, worker in enumerate(self._workers):
            own = offers[number * processes : (number + 1) * processes]
            calls[worker.call("open_receiver", channel, own)] = worker
        settle(calls)

    def update(self, version: int) -> int:
        """Give every receiver the policy's weights as this version. Returns the bytes received, over all of them."""
        takes = {worker.call("update_weights", version): worker for worker in self._workers}
        sends = {rank.call("send_weights"): rank for rank in self._ranks}
        return sum(settle({**takes, **sends})[: len(takes)])


def choose_transports(ranks: Sequence[Worker], receivers: Sequence[Receiver]) -> list[tuple[str, int]]:
    """(transport, sending rank) of every receiver, by device."""
    if ranks[0].device is None:
        return [(GLOO, 0)] * len(receivers)
    by_device = {rank.device: number for number, rank in reversed(list(enumerate(ranks)))}
    return [
        (CUDA_IPC, by_device[receiver.device]) if receiver.device in by_device else (NCCL, 0) for receiver in receivers
    ]
