"""The driver's side of a weight transfer: which way each generator gets its weights, and one update at a time.

    policy on CPU   shared memory when every generator is on rank 0's machine, else gloo broadcasts from it
    policy on GPU   CUDA IPC from the rank on the generator's own GPU, else NCCL from rank 0

Chosen by where the workers turned out to be, not by a setting.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from nemotron_steps.engine.placement.workers import Worker, settle

SHARED_MEMORY, GLOO, CUDA_IPC, NCCL = "shared_memory", "gloo", "cuda_ipc", "nccl"
STREAM = "stream"
"""CUDA_IPC, NCCL and GLOO, for the two ends."""
OBJECTS = "objects"
"""Through Ray's object store: for tensors that come from, or go to, the driver itself."""


class WeightTransfer:
    """The open ways from the ranks of one policy to the workers of one generator.

    Args:
        ranks: policy workers in rank order.
        receivers: generation workers.
        address: host and port of the policy's store.
    """

    def __init__(self, ranks: Sequence[Worker], receivers: Sequence[Worker], address: tuple[str, int]) -> None:
        self._ranks, self._receivers = list(ranks), list(receivers)
        self._channel = uuid.uuid4().hex
        self.ways = choose_ways(ranks, receivers)
        """Each receiver's (way, sending rank)."""
        self._streams = self.ways[0][0] != SHARED_MEMORY
        if self._streams:
            self._open_streams(address)
        else:
            self._open_segment()

    def update(self, version: int) -> int:
        """Give every receiver the policy's weights as this version. Returns the bytes received, over all of them."""
        sends = {rank.call("send_weights", self._channel): rank for rank in self._ranks}
        if not self._streams:  # first written, then read
            settle(sends)
            sends = {}
        arguments = ("update_weights", self._channel, version)
        takes = {receiver.call(*arguments): receiver for receiver in self._receivers}
        return sum(settle({**takes, **sends})[: len(takes)])

    def _open_segment(self) -> None:
        offer = settle({rank.call("open_sender", self._channel, SHARED_MEMORY): rank for rank in self._ranks})[0]
        arguments = ("open_receiver", self._channel, SHARED_MEMORY, offer)
        try:
            settle({receiver.call(*arguments): receiver for receiver in self._receivers})
        finally:  # memory under a name would outlive every process
            settle({self._ranks[0].call("hide_segment", self._channel): self._ranks[0]})

    def _open_streams(self, address: tuple[str, int]) -> None:
        names = [receiver.name for receiver in self._receivers]
        others = [name for name, (way, _) in zip(names, self.ways, strict=True) if way != CUDA_IPC]
        calls = {}
        for number, rank in enumerate(self._ranks):
            ipc = [name for name, way in zip(names, self.ways, strict=True) if way == (CUDA_IPC, number)]
            calls[rank.call("open_sender", self._channel, STREAM, ipc, others if number == 0 else [])] = rank
        offers = settle(calls)
        opened = {}
        for receiver, (way, number) in zip(self._receivers, self.ways, strict=True):
            place = (1 + others.index(receiver.name), 1 + len(others)) if way != CUDA_IPC else None
            offer = (STREAM, offers[number], address, receiver.name, place)
            opened[receiver.call("open_receiver", self._channel, *offer)] = receiver
        settle(opened)


def choose_ways(ranks: Sequence[Worker], receivers: Sequence[Worker]) -> list[tuple[str, int]]:
    """(way, sending rank) of every receiver, by device and machine."""
    if ranks[0].device is None:
        together = all(receiver.node == ranks[0].node for receiver in receivers)
        return [(SHARED_MEMORY if together else GLOO, 0)] * len(receivers)
    by_device = {rank.device: number for number, rank in reversed(list(enumerate(ranks)))}
    return [
        (CUDA_IPC, by_device[receiver.device]) if receiver.device in by_device else (NCCL, 0) for receiver in receivers
    ]
