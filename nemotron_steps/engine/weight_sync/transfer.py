"""Weights from a policy rank to generators in other processes, never through the driver, whose side is WeightTransfer.

They travel in buckets, sent and received at the same time: by CUDA IPC out of the sender's staging buffer, or by
broadcasts (NCCL, gloo) in a process group beside the ones that training uses. Which weight lies where in which bucket
is agreed on once. Both sides keep step through a TCPStore. A receiver copies every bucket into memory of its own: vLLM
keeps references to what it was given until a layer is complete.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from nemotron_steps.engine.workers.workers import Worker, join_store, settle
from nemotron_steps.errors import RESUME, EngineError, WorkerLostError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


BUCKET_BYTES = 256 * 2**20
_ALIGNMENT = 256


@dataclass(frozen=True)
class Entry:
    """One weight in a bucket."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    """Bytes from the beginning of the bucket."""

    @property
    def bytes(self) -> int:
        """Without padding."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class Bucket:
    """Weights that travel together."""

    entries: tuple[Entry, ...]
    bytes: int

    def views(self, buffer: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights as views of a uint8 buffer that begins with this bucket."""
        for entry in self.entries:
            yield entry.name, buffer[entry.start : entry.start + entry.bytes].view(entry.dtype).view(entry.shape)


@dataclass(frozen=True)
class WeightPlan:
    """Every weight of a model, in the policy's order."""

    buckets: tuple[Bucket, ...]

    @classmethod
    def of(cls, weights: Iterable[tuple[str, torch.Tensor]], bucket_bytes: int = BUCKET_BYTES) -> WeightPlan:
        """The plan for these weights. A weight larger than a bucket gets one of its own."""
        buckets: list[Bucket] = []
        entries: list[Entry] = []
        end = 0
        for name, tensor in weights:
            size = -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT
            if end + size > bucket_bytes:
                if entries:
                    buckets.append(Bucket(tuple(entries), end))
                entries, end = [], 0
            entries.append(Entry(name, tuple(tensor.shape), tensor.dtype, end))
            end += size
        return cls((*buckets, Bucket(tuple(entries), end)) if entries else ())

    @property
    def payload(self) -> int:
        """Bytes of the weights themselves, without padding."""
        return sum(entry.bytes for bucket in self.buckets for entry in bucket.entries)

    @property
    def largest(self) -> int:
        """Bytes of the largest bucket."""
        return max((bucket.bytes for bucket in self.buckets), default=0)

    def fill(self, bucket: Bucket, buffer: torch.Tensor, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Copy the next weights into a uint8 buffer."""
        for name, view in bucket.views(buffer):
            got, tensor = next(weights, ("nothing", view))
            if got != name or tensor.shape != view.shape or tensor.dtype is not view.dtype:
                expected = f"{name} {tuple(view.shape)} {view.dtype}"
                found = f"{got} {tuple(tensor.shape)} {tensor.dtype}"
                raise EngineError("the policy's weights changed between two transfers", expected=expected, found=found)
            view.copy_(tensor.detach())


FIRST_SECONDS = 900.0
"""The first transfer waits for generators that are still loading."""
LATER_SECONDS = 60.0
"""On GPUs. On CPU what computes may take as long between two buckets as a model takes to load."""
_STORAGE_DEVICE = 6
"""Place of the device's number among rebuild_cuda_tensor's arguments."""


@dataclass(frozen=True)
class Offer:
    """What a receiver must know of a sender; travels from that, through the driver, to the receiver."""

    plan: WeightPlan
    sender: str
    """Name of the sender, the prefix of its keys."""
    staging: Any
    """CUDA IPC handle of the staging buffer; None without IPC receivers."""
    address: tuple[str, int] | None = None
    """Host and port of the store that both ends meet at."""
    name: str = ""
    """Of this receiver."""
    place: tuple[int, int] | None = None
    """(rank, ranks) in the sender's broadcasts; None for CUDA IPC."""


@dataclass(frozen=True)
class ChannelHandles:
    """The weights of a channel for a generator of several processes: each takes up its own offer, in rank order."""

    channel: str
    offers: tuple[Offer, ...]

    @property
    def bytes(self) -> int:
        """Of one transfer, over all receivers."""
        return sum(offer.plan.payload for offer in self.offers)


class _Steps:
    """Waiting for each other."""

    def __init__(self, store: Store, sender: str, device: torch.device) -> None:
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        self._store = PrefixStore(f"weight_sync/{sender}", store)
        self.transfer, self._later = -1, _later_seconds(device)

    def tell(self, bucket: int, what: str, receiver: str = "all") -> None:
        self._store.set(f"{self.transfer}/{bucket}/{what}/{receiver}", "1")

    def wait(self, bucket: int, what: str, receivers: Sequence[str] = ("all",)) -> None:
        if not receivers:
            return
        keys = [f"{self.transfer}/{bucket}/{what}/{receiver}" for receiver in receivers]
        seconds = FIRST_SECONDS if self.transfer == 0 else self._later
        import torch.distributed as dist

        try:
            self._store.wait(keys, timedelta(seconds=seconds))
        except (dist.DistStoreError, RuntimeError) as error:
            raise WorkerLostError(
                "the other side of a weight transfer does not answer",
                where=f"transfer {self.transfer}, bucket {bucket}",
                expected=f"`{what}` from {', '.join(receivers)} within {seconds:.0f} s",
                found=str(error).splitlines()[0],
                hints=(f"{RESUME}   # goes on from the last training checkpoint",),
            ) from error

    def forget(self, bucket: int, what: str, receivers: Sequence[str] = ("all",)) -> None:
        for receiver in receivers:
            self._store.delete_key(f"{self.transfer}/{bucket}/{what}/{receiver}")


class StreamSender:
    """A policy rank's side."""

    def __init__(
        self,
        plan: WeightPlan,
        store: Store,
        name: str,
        *,
        ipc: Sequence[str],
        broadcast: Sequence[str],
        device: torch.device,
    ) -> None:
        self._plan, self._name = plan, name
        self._ipc, self._receivers = tuple(ipc), (*ipc, *broadcast)
        self._steps = _Steps(store, name, device)
        self._staging = torch.empty(plan.largest, dtype=torch.uint8, device=device)
        self._group = _BroadcastGroup(store, name, 0, 1 + len(broadcast), device) if broadcast else None

    def offer(self) -> Offer:
        """What the receivers need, but for their own place."""
        from torch.multiprocessing.reductions import reduce_tensor

        staging = reduce_tensor(self._staging)[1] if self._ipc else None  # type: ignore[no-untyped-call]
        return Offer(self._plan, self._name, staging)

    def send(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Send every weight to every receiver; returns when all of them have taken the last bucket."""
        steps = self._steps
        steps.transfer += 1
        steps.wait(0, "begun", self._receivers)
        for number, bucket in enumerate(self._plan.buckets):
            if number:
                steps.wait(number - 1, "taken", self._ipc)
            part = self._staging[: bucket.bytes]
            self._plan.fill(bucket, part, weights)
            if self._ipc:
                _synchronize(part.device)
                steps.tell(number, "filled")
            if self._group is not None:
                self._group.broadcast(part)
        last = len(self._plan.buckets) - 1
        steps.wait(last, "done", self._receivers)
        _synchronize(self._staging.device)
        # Everyone is done with this transfer's keys.
        steps.forget(0, "begun", self._receivers)
        steps.forget(last, "done", self._receivers)
        for number in range(len(self._plan.buckets) if self._ipc else 0):
            steps.forget(number, "filled")
            steps.forget(number, "taken", self._ipc)


class StreamReceiver:
    """A generator's side."""

    def __init__(self, offer: Offer, store: Store, device: torch.device) -> None:
        self._plan, self._name, self._device = offer.plan, offer.name, device
        self._steps = _Steps(store, offer.sender, device)
        self._staging: torch.Tensor | None = None
        self._group: _BroadcastGroup | None = None
        if offer.place is not None:
            self._group = _BroadcastGroup(store, offer.sender, *offer.place, device)
            return
        from torch.multiprocessing.reductions import rebuild_cuda_tensor

        handle = list(offer.staging)
        handle[_STORAGE_DEVICE] = device.index  # the sender's number of the GPU that both share may be another
        self._staging = rebuild_cuda_tensor(*handle)  # type: ignore[no-untyped-call]

    @staticmethod
    def of(offer: Offer) -> StreamReceiver:
        """In the process and on the device where the weights are to arrive."""
        from nemotron_steps.engine.policy.distributed import parallel_dims

        assert offer.address is not None
        return StreamReceiver(offer, join_store(*offer.address), parallel_dims.device())

    @property
    def bytes(self) -> int:
        """Of one transfer."""
        return self._plan.payload

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights of one transfer; must be read to the end."""
        steps = self._steps
        steps.transfer += 1
        steps.tell(0, "begun", self._name)
        for number, bucket in enumerate(self._plan.buckets):
            own = torch.empty(bucket.bytes, dtype=torch.uint8, device=self._device)
            if self._group is not None:
                self._group.broadcast(own)
            else:
                assert self._staging is not None
                steps.wait(number, "filled")
                own.copy_(self._staging[: bucket.bytes])
                _synchronize(self._device)
                steps.tell(number, "taken", self._name)
            yield from bucket.views(own)
        _synchronize(self._device)
        steps.tell(len(self._plan.buckets) - 1, "done", self._name)


class _BroadcastGroup:
    """A communicator outside torch.distributed's world; it connects at the first broadcast."""

    def __init__(self, store: Store, name: str, rank: int, size: int, device: torch.device) -> None:
        self._store, self._name, self._rank, self._size, self._device = store, name, rank, size, device
        self._group: Any = None

    def broadcast(self, tensor: torch.Tensor) -> None:
        import torch.distributed as dist

        if self._group is None:
            store = dist.PrefixStore(f"broadcast/{self._name}", self._store)  # type: ignore[attr-defined]
            timeout = timedelta(seconds=_later_seconds(self._device))
            if self._device.type == "cpu":
                self._group = dist.ProcessGroupGloo(store, self._rank, self._size, timeout)
            else:
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = timeout
                self._group = dist.ProcessGroupNCCL(store, self._rank, self._size, options)
        broadcast = dist.BroadcastOptions()
        broadcast.rootRank, broadcast.rootTensor = 0, 0
        self._group.broadcast([tensor], broadcast).wait()


def _later_seconds(device: torch.device) -> float:
    return FIRST_SECONDS if device.type == "cpu" else LATER_SECONDS


def _synchronize(device: torch.device) -> None:
    """What was queued on the device's stream is done."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


GLOO, CUDA_IPC, NCCL = "gloo", "cuda_ipc", "nccl"


def receivers_of(worker: Worker, processes: int) -> list[tuple[str, str | None]]:
    """The processes of a generation worker, in rank order: a name, and which of the worker's GPUs is its own."""
    names = [worker.name] if processes == 1 else [f"{worker.name}/{rank}" for rank in range(processes)]
    return list(zip(names, (*worker.devices, *[None] * processes), strict=False))


class WeightTransfer:
    """The open transports from the ranks of one policy to the workers of one generator."""

    def __init__(
        self, ranks: Sequence[Worker], workers: Sequence[Worker], address: tuple[str, int], *, processes: int = 1
    ) -> None:
        self._ranks, self._workers = list(ranks), list(workers)
        channel = uuid.uuid4().hex
        receivers = [receiver for worker in workers for receiver in receivers_of(worker, processes)]
        names = [name for name, _ in receivers]
        self.transports = choose_transports(ranks, [device for _, device in receivers])
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


def choose_transports(ranks: Sequence[Worker], devices: Sequence[str | None]) -> list[tuple[str, int]]:
    """(transport, sending rank) of every receiver, by device: CUDA IPC from the rank on the receiver's own GPU, else
    NCCL from rank 0; on CPU gloo."""
    if ranks[0].device is None:
        return [(GLOO, 0)] * len(devices)
    by_device = {rank.device: number for number, rank in reversed(list(enumerate(ranks)))}
    return [(CUDA_IPC, by_device[device]) if device in by_device else (NCCL, 0) for device in devices]
