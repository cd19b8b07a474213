"""Buckets from a policy rank to generators, sender and receivers at the same time: CUDA IPC out of the sender's staging
buffer, or broadcasts (NCCL, gloo) in a process group beside the ones that training uses.

Both sides keep step through a TCPStore. A receiver copies every bucket into memory of its own: vLLM keeps references to
what it was given until a layer is complete.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from nemotron_steps.engine.weight_sync.plan import WeightPlan
from nemotron_steps.errors import RESUME, WorkerLostError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

FIRST_SECONDS = 900.0
"""The first transfer waits for generators that are still loading."""
LATER_SECONDS = 60.0
_STORAGE_DEVICE = 6
"""Place of the device's number among rebuild_cuda_tensor's arguments."""


@dataclass(frozen=True)
class StreamHandle:
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
                hints=(f"{RESUME}   # goes on from the last training checkpoint",),
            ) from error

    def forget(self, keys_of: Sequence[tuple[int, str, str]]) -> None:
        """Remove this transfer's keys; the sender does it when everyone is done with them."""
        for bucket, what, receiver in keys_of:
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
        self._steps = _Steps(store, name)
        self._staging = torch.empty(plan.largest, dtype=torch.uint8, device=device)
        self._group = _BroadcastGroup(store, name, 0, 1 + len(broadcast), device) if broadcast else None

    def offer(self) -> StreamHandle:
        """What the receivers need."""
        from torch.multiprocessing.reductions import reduce_tensor

        staging = reduce_tensor(self._staging)[1] if self._ipc else None  # type: ignore[no-untyped-call]
        return StreamHandle(self._plan, self._name, staging)

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
        numbers = range(len(self._plan.buckets))
        steps.forget(
            [(0, "begun", r) for r in self._receivers]
            + [(last, "done", r) for r in self._receivers]
            + [(n, "filled", "all") for n in numbers if self._ipc]
            + [(n, "taken", r) for n in numbers for r in self._ipc]
        )


class StreamReceiver:
    """A generator's side."""

    def __init__(
        self, offer: StreamHandle, store: Store, name: str, place: tuple[int, int] | None, device: torch.device
    ) -> None:
        self._plan, self._name, self._device = offer.plan, name, device
        self._steps = _Steps(store, offer.sender)
        self._group = _BroadcastGroup(store, offer.sender, *place, device) if place is not None else None
        self._staging: torch.Tensor | None = None
        if place is None:
            from torch.multiprocessing.reductions import rebuild_cuda_tensor

            handle = list(offer.staging)
            handle[_STORAGE_DEVICE] = device.index  # the sender's number of the GPU that both share may be another
            self._staging = rebuild_cuda_tensor(*handle)  # type: ignore[no-untyped-call]

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
            self._group = self._connect()
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        self._group.broadcast([tensor], options).wait()

    def _connect(self) -> Any:
        import torch.distributed as dist

        store = dist.PrefixStore(f"broadcast/{self._name}", self._store)  # type: ignore[attr-defined]
        timeout = timedelta(seconds=LATER_SECONDS)
        if self._device.type == "cpu":
            return dist.ProcessGroupGloo(store, self._rank, self._size, timeout)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, self._rank, self._size, options)


def _synchronize(device: torch.device) -> None:
    """What was queued on the device's stream is done."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
