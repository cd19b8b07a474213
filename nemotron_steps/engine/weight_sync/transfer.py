"""The driver's side of a weight transfer: by which transport each generator gets its weights, and one update at a time.

Chosen by where the workers turned out to be: on CPU shared memory on one machine, else gloo; on GPU CUDA IPC from the
rank on the generator's own GPU, else NCCL from rank 0.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from nemotron_steps.engine.weight_sync.transport_handle import (
    CUDA_IPC,
    GLOO,
    NCCL,
    SHARED_MEMORY,
    STREAM,
    TransportHandle,
)
from nemotron_steps.engine.workers.workers import Worker, settle


@dataclass(frozen=True)
class Receiver:
    """One process that weights go to: a generator, or one of its tensor-parallel workers."""

    name: str
    node: str
    device: str | None = None

    @classmethod
    def of(cls, worker: Worker, processes: int) -> list[Receiver]:
        """Those of a generation worker, in rank order; each has one of the worker's GPUs."""
        names = [worker.name] if processes == 1 else [f"{worker.name}/{rank}" for rank in range(processes)]
        devices = (*worker.devices, *[None] * processes)
        return [cls(name, worker.node, device) for name, device in zip(names, devices, strict=False)]


class WeightTransfer:
    """The open transports from the ranks of one policy to the workers of one generator."""

    def __init__(
        self,
        ranks: Sequence[Worker],
        workers: Sequence[Worker],
        address: tuple[str, int],
        *,
        processes: int = 1,
        part: str = "whole",
    ) -> None:
        self._part = part
        self._ranks, self._workers, self._processes = list(ranks), list(workers), processes
        self._channel = uuid.uuid4().hex
        receivers = [receiver for worker in workers for receiver in Receiver.of(worker, processes)]
        self.transports = choose_transports(ranks, receivers)
        """Each receiver's (transport, sending rank)."""
        self._streams = self.transports[0][0] != SHARED_MEMORY
        if self._streams:
            self._open_streams(receivers, address)
        else:
            opening = (self._channel, SHARED_MEMORY, (), (), part)
            offer = settle({rank.call("open_sender", *opening): rank for rank in self._ranks})[0]
            try:
                self._open_receivers([TransportHandle(SHARED_MEMORY, offer)] * len(receivers))
            finally:  # memory under a name would outlive every process
                settle({self._ranks[0].call("hide_segment", self._channel): self._ranks[0]})

    def update(self, version: int) -> int:
        """Give every receiver the policy's weights as this version. Returns the bytes received, over all of them."""
        sends = {rank.call("send_weights", self._channel): rank for rank in self._ranks}
        if not self._streams:  # first written, then read
            settle(sends)
            sends = {}
        takes = {worker.call("update_weights", self._channel, version): worker for worker in self._workers}
        return sum(settle({**takes, **sends})[: len(takes)])

    def _open_streams(self, receivers: Sequence[Receiver], address: tuple[str, int]) -> None:
        names = [receiver.name for receiver in receivers]
        others = [name for name, (transport, _) in zip(names, self.transports, strict=True) if transport != CUDA_IPC]
        calls = {}
        for number, rank in enumerate(self._ranks):
            ipc = [
                name for name, transport in zip(names, self.transports, strict=True) if transport == (CUDA_IPC, number)
            ]
            broadcast = others if number == 0 else []
            calls[rank.call("open_sender", self._channel, STREAM, ipc, broadcast, self._part)] = rank
        offers = settle(calls)
        taken = []
        for name, (transport, number) in zip(names, self.transports, strict=True):
            place = (1 + others.index(name), 1 + len(others)) if transport != CUDA_IPC else None
            taken.append(TransportHandle(STREAM, offers[number], address, name, place))
        self._open_receivers(taken)

    def _open_receivers(self, offers: Sequence[TransportHandle]) -> None:
        """Give every generation worker the offers of its processes."""
        calls = {}
        for number, worker in enumerate(self._workers):
            own = offers[number * self._processes : (number + 1) * self._processes]
            calls[worker.call("open_receiver", self._channel, own)] = worker
        settle(calls)


class AdapterTransfer:
    """The same for a policy that trains adapters: its frozen weights travel once, and then A and B alone."""

    def __init__(
        self, ranks: Sequence[Worker], workers: Sequence[Worker], address: tuple[str, int], *, processes: int = 1
    ) -> None:
        self._frozen, self._adapters = (
            WeightTransfer(ranks, workers, address, processes=processes, part=part) for part in ("frozen", "adapters")
        )
        self.transports = self._adapters.transports
        self._sent = False

    def update(self, version: int) -> int:
        """See WeightTransfer."""
        moved = 0 if self._sent else self._frozen.update(version)
        self._sent = True
        return moved + self._adapters.update(version)


def choose_transports(ranks: Sequence[Worker], receivers: Sequence[Receiver]) -> list[tuple[str, int]]:
    """(transport, sending rank) of every receiver, by device and machine."""
    if ranks[0].device is None:
        together = all(receiver.node == ranks[0].node for receiver in receivers)
        return [(SHARED_MEMORY if together else GLOO, 0)] * len(receivers)
    by_device = {rank.device: number for number, rank in reversed(list(enumerate(ranks)))}
    return [
        (CUDA_IPC, by_device[receiver.device]) if receiver.device in by_device else (NCCL, 0) for receiver in receivers
    ]
