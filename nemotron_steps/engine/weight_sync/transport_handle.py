"""What travels from a sender, through the driver, to the receivers of its weights: transports, never tensors."""

from dataclasses import dataclass
from typing import Any

from nemotron_steps.engine.weight_sync.plan import WeightPlan

SHARED_MEMORY, GLOO, CUDA_IPC, NCCL = "shared_memory", "gloo", "cuda_ipc", "nccl"
STREAM = "stream"
"""CUDA_IPC, NCCL and GLOO, for the two ends."""


@dataclass(frozen=True)
class TransportHandle:
    """How one process gets a policy's weights; may travel to it."""

    transport: str
    offer: Any
    """As the sender opened it."""
    address: tuple[str, int] | None = None
    """Host and port of the policy's store; None where nothing is agreed on through it."""
    name: str = ""
    """Of this receiver, for the sender."""
    place: tuple[int, int] | None = None
    """(rank, ranks) in the sender's broadcasts; None for any other transport."""

    @property
    def plan(self) -> WeightPlan:
        """Of the weights to come."""
        plan = self.offer[0] if self.transport == SHARED_MEMORY else self.offer.plan
        assert isinstance(plan, WeightPlan)
        return plan


@dataclass(frozen=True)
class ChannelHandles:
    """The weights of a channel for a generator of several processes: each takes up its own offer, in rank order."""

    channel: str
    offers: tuple[TransportHandle, ...]

    @property
    def bytes(self) -> int:
        """Of one transfer, over all receivers."""
        return sum(offer.plan.payload for offer in self.offers)
