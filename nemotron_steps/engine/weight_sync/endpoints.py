"""The two ends of a weight transfer, inside a policy rank and inside a generation worker.

Of a policy that trains adapters, what these are added to is kept where the weights arrive; A, and B times its scale,
travel through the transports that whole weights take (docs/decisions/adapters.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from nemotron_steps.engine.policy.distributed import parallel_dims as parallel
from nemotron_steps.engine.weight_sync.plan import WeightPlan
from nemotron_steps.engine.weight_sync.shared_memory import SegmentReader, SegmentWriter
from nemotron_steps.engine.weight_sync.streams import StreamReceiver, StreamSender
from nemotron_steps.engine.weight_sync.transport_handle import SHARED_MEMORY, TransportHandle
from nemotron_steps.engine.workers.rendezvous import join_store
from nemotron_steps.models.adapters import hf_weight, is_half, low_rank_sum

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

Weights = Iterator[tuple[str, torch.Tensor]]


class SendingEndpoint:
    """A policy rank's. `weights` is collective, so every rank reads it to the end, whether it sends or not."""

    def __init__(self, channel: str, weights: Callable[[], Weights], rank: int, store: Callable[[], Store]) -> None:
        self._name = f"{channel}/rank {rank}"
        self._weights, self._rank, self._store = weights, rank, store
        self._segment: SegmentWriter | None = None
        self._stream: StreamSender | None = None

    def open(self, transport: str, ipc: Sequence[str] = (), broadcast: Sequence[str] = ()) -> Any:
        """Get ready to send; returns what the receivers need, None from a rank that only takes part."""
        plan = WeightPlan.of(self._weights())
        if transport == SHARED_MEMORY:
            if self._rank != 0:
                return None
            self._segment = SegmentWriter(plan)
            return plan, self._segment.path
        if not ipc and not broadcast:
            return None
        self._stream = StreamSender(
            plan, self._store(), self._name, ipc=ipc, broadcast=broadcast, device=parallel.device()
        )
        return self._stream.offer()

    def hide_segment(self) -> None:
        """Everyone has mapped the segment: remove its name."""
        if self._segment is not None:
            self._segment.unlink()

    def send(self) -> None:
        """One transfer."""
        if self._segment is not None:
            self._segment.write(self._weights())
        elif self._stream is not None:
            self._stream.send(self._weights())
        else:
            for _ in self._weights():
                pass


def is_adapter(plan: WeightPlan) -> bool:
    """Whether halves of adapters travel by a plan."""
    return any(is_half(entry.name) for bucket in plan.buckets for entry in bucket.entries)


class FrozenWeights:
    """Where a generator's weights arrive: what adapters are added to, in host memory."""

    def __init__(self) -> None:
        self._kept: dict[str, torch.Tensor | None] = {}

    def expect(self, plan: WeightPlan) -> None:
        """Keep the weights that this plan's adapters belong to, of those that come from now on."""
        names = (entry.name for bucket in plan.buckets for entry in bucket.entries if is_half(entry.name))
        self._kept.update((hf_weight(name), None) for name in names if name.endswith(".lora_B.weight"))

    def through(self, weights: Weights) -> Weights:
        """Weights as they come, and sums where halves of adapters come: A, then each B that has it."""
        linear_in: torch.Tensor | None = None
        for name, tensor in weights:
            if not is_half(name):
                if name in self._kept:
                    self._kept[name] = tensor.to("cpu", copy=True)
                yield name, tensor
            elif name.endswith(".lora_A.weight"):
                linear_in = tensor.clone()  # a view of a buffer that B may no longer be in
            else:
                kept = self._kept[hf_weight(name)]
                assert kept is not None and linear_in is not None, "frozen weights come before adapters"
                yield hf_weight(name), low_rank_sum(kept.to(tensor.device), linear_in, tensor, 1.0)


class ReceivingEndpoint:
    """A generation worker's, or that of one of its processes: opened where the weights are to arrive."""

    def __init__(self, offered: TransportHandle, frozen: FrozenWeights) -> None:
        self._plan, self._frozen = offered.plan, frozen
        self.is_adapter = is_adapter(self._plan)
        """Whether adapters arrive here, and of the weights those that they change are read."""
        frozen.expect(self._plan)
        self._from: SegmentReader | StreamReceiver
        if offered.transport == SHARED_MEMORY:
            self._from = SegmentReader(*offered.offer)
        else:
            assert offered.address is not None
            store = join_store(*offered.address)
            self._from = StreamReceiver(offered.offer, store, offered.name, offered.place, parallel.device())

    @property
    def bytes(self) -> int:
        """Of one transfer."""
        return self._plan.payload

    def weights(self) -> Weights:
        """The weights of one transfer, in the policy's order."""
        return self._frozen.through(self._from.weights())
