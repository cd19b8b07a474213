"""Buckets between GPUs, sender and receivers at the same time.

    CUDA IPC   the receiver shares the sender's GPU: it maps the sender's staging buffer once and copies out of it
    NCCL       another GPU: a broadcast in a process group of its own, beside the ones that training uses

Both sides keep step through a TCPStore, whose keys are `<transfer>/<bucket>/<what>/<receiver>`. A receiver copies
every bucket into memory of its own: vLLM keeps references to what it was given until a layer is complete.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from nemotron_steps.engine.weight_sync.plan import WeightPlan
from nemotron_steps.errors import WorkerLostError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

FIRST_SECONDS = 900.0
"""The first transfer waits for generators that are still loading."""
LATER_SECONDS = 60.0


@dataclass(frozen=True)
class StreamOffer:
    """What a receiver must know of a sender."""

    plan: WeightPlan
    sender: str
    """Name of the sender, the prefix of its keys."""
    staging: Any
    """CUDA IPC handle of the staging buffer; None without IPC receivers."""


class _Steps:
    """Waiting for each other."""

    def __init__(self, store: Store, sender: str) -> None:
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        self._store = PrefixStore(f"weight_sync/{sender}", store)
        self.transfer = -1
        self._old: list[str] = []

    def begin(self) -> None:
        self.transfer += 1

    def tell(self, bucket: int, what: str, receiver: str = "all") -> None:
        self._store.set(f"{self.transfer}/{bucket}/{what}/{receiver}", "1")

    def wait(self, bucket: int, what: str, receivers: Sequence[str] = ("all",)) -> None:
        if not receivers:
            return
        keys = [f"{self.transfer}/{bucket}/{what}/{receiver}" for receiver in receivers]
        seconds = FIRST_SECONDS if self.transfer == 0 else LATER_SECONDS
        import torch.distributed as dist

        try:
            self._store.wait(keys, timedelta(seconds=seconds))
        except (dist.DistStoreError, RuntimeError) as error:
            raise WorkerLostError(
                "the other side of a weight transfer does not answer",
                where=f"transfer {self.transfer}, bucket {bucket}",
                expected=f"`{what}` from {', '.join(receivers)} within {seconds:.0f} s",
                found=str(error).splitlines()[0],
            ) from error

    def forget(self, keys_of: Sequence[tuple[int, str, str]]) -> None:
        """Remove this transfer's keys; the sender does it when everyone is done with them."""
        for bucket, what, receiver in keys_of:
            self._store.delete_key(f"{self.transfer}/{bucket}/{what}/{receiver}")


class StreamSender:
    """A policy rank's side.

    Args:
        name: unique among the senders of a store.
        ipc: names of the receivers on this rank's GPU. nccl: names of those on other GPUs, in rank order.
    """

    def __init__(self, plan: WeightPlan, store: Store, name: str, *, ipc: Sequence[str], nccl: Sequence[str]) -> None:
        self._plan, self._name = plan, name
        self._ipc, self._receivers = tuple(ipc), (*ipc, *nccl)
        self._steps = _Steps(store, name)
        self._staging = torch.empty(plan.largest, dtype=torch.uint8, device="cuda")
        self._nccl = _nccl_group(store, name, 0, 1 + len(nccl)) if nccl else None

    def offer(self) -> StreamOffer:
        """What the receivers need."""
        from torch.multiprocessing.reductions import reduce_tensor

        staging = reduce_tensor(self._staging)[1] if self._ipc else None  # type: ignore[no-untyped-call]
        return StreamOffer(self._plan, self._name, staging)

    def send(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Send every weight to every receiver; returns when all of them have taken the last bucket."""
        steps = self._steps
        steps.begin()
        steps.wait(0, "begun", self._receivers)
        for number, bucket in enumerate(self._plan.buckets):
            if number:
                steps.wait(number - 1, "taken", self._ipc)
            part = self._staging[: bucket.bytes]
            self._plan.fill(bucket, part, weights)
            if self._ipc:
                torch.cuda.current_stream().synchronize()
                steps.tell(number, "filled")
            if self._nccl is not None:
                _broadcast(self._nccl, part)
        last = len(self._plan.buckets) - 1
        steps.wait(last, "done", self._receivers)
        torch.cuda.current_stream().synchronize()
        numbers = range(len(self._plan.buckets))
        steps.forget(
            [(0, "begun", r) for r in self._receivers]
            + [(last, "done", r) for r in self._receivers]
            + [(n, "filled", "all") for n in numbers if self._ipc]
            + [(n, "taken", r) for n in numbers for r in self._ipc]
        )


class StreamReceiver:
    """A generator's side.

    Args:
        name: as the sender knows this receiver.
        nccl: (rank, ranks) in the sender's NCCL group; None for CUDA IPC.
    """

    def __init__(self, offer: StreamOffer, store: Store, name: str, nccl: tuple[int, int] | None) -> None:
        self._plan, self._name = offer.plan, name
        self._steps = _Steps(store, offer.sender)
        self._nccl = _nccl_group(store, offer.sender, *nccl) if nccl is not None else None
        self._staging: torch.Tensor | None = None
        if nccl is None:
            from torch.multiprocessing.reductions import rebuild_cuda_tensor

            self._staging = rebuild_cuda_tensor(*offer.staging)  # type: ignore[no-untyped-call]

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights of one transfer; must be read to the end."""
        steps = self._steps
        steps.begin()
        steps.tell(0, "begun", self._name)
        for number, bucket in enumerate(self._plan.buckets):
            own = torch.empty(bucket.bytes, dtype=torch.uint8, device="cuda")
            if self._staging is not None:
                steps.wait(number, "filled")
                own.copy_(self._staging[: bucket.bytes])
                torch.cuda.current_stream().synchronize()
                steps.tell(number, "taken", self._name)
            else:
                _broadcast(self._nccl, own)
            yield from bucket.views(own)
        torch.cuda.current_stream().synchronize()
        steps.tell(len(self._plan.buckets) - 1, "done", self._name)


def _nccl_group(store: Store, name: str, rank: int, size: int) -> Any:
    """An NCCL communicator that is no part of torch.distributed's default world."""
    import torch.distributed as dist

    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=FIRST_SECONDS)
    return dist.ProcessGroupNCCL(dist.PrefixStore(f"nccl/{name}", store), rank, size, options)  # type: ignore[attr-defined]


def _broadcast(group: Any, tensor: torch.Tensor) -> None:
    import torch.distributed as dist

    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    group.broadcast([tensor], options).wait()
