"""Pipeline schedules: how micro-batches move through stages that each hold some of the layers.

One forward, one backward (PipeDream-flush, arXiv 2006.09503). Every stage plans the same micro-batches, so shapes are
never sent.
"""

from collections import deque
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from nemotron_steps.engine.policy.distributed.parallel_dims import Groups

Forward = Callable[[int, Tensor | None], Tensor]
"""(micro-batch, received hidden states) → those to send on; on the last stage the loss."""
Shape = Callable[[int], tuple[int, ...]]
"""Shape of the hidden states of a micro-batch between stages."""


class Pipeline:
    """This rank's stage."""

    def __init__(self, groups: Groups, dtype: torch.dtype, device: torch.device) -> None:
        self._groups, self._dtype, self._device = groups, dtype, device
        ranks = dist.get_process_group_ranks(groups.pipeline)
        self._before = None if groups.is_first_stage else ranks[groups.stage - 1]
        self._after = None if groups.is_last_stage else ranks[groups.stage + 1]

    def infer(self, count: int, forward: Forward, shape: Shape) -> None:
        """Forward only. Call without gradients."""
        for number in range(count):
            (received,) = self._exchange(receive=[(self._before, shape(number))])
            out = forward(number, received)
            self._exchange(send=[(self._after, out)])

    def train(self, count: int, forward: Forward, shape: Shape) -> None:
        """Forward and backward of every micro-batch; gradients accumulate in the parameters."""
        if self._groups.stages == 1:
            for number in range(count):
                forward(number, None).backward()
            return
        in_flight: deque[tuple[int, Tensor | None, Tensor]] = deque()
        ahead = min(self._groups.stages - self._groups.stage - 1, count)

        def run(number: int, received: Tensor | None) -> Tensor:
            if received is not None:
                received.requires_grad_()
            out = forward(number, received)
            in_flight.append((number, received, out))
            return out

        def back(gradient: Tensor | None) -> Tensor | None:
            _, received, out = in_flight.popleft()
            torch.autograd.backward(out, gradient)
            return None if received is None else received.grad

        for number in range(ahead):
            (received,) = self._exchange(receive=[(self._before, shape(number))])
            self._exchange(send=[(self._after, run(number, received))])
        received = None
        if ahead < count:
            (received,) = self._exchange(receive=[(self._before, shape(ahead))])
        for number in range(ahead, count):
            out = run(number, received)
            (gradient,) = self._exchange(send=[(self._after, out)], receive=[(self._after, shape(in_flight[0][0]))])
            gradient = back(gradient)
            coming = [(self._before, shape(number + 1))] if number + 1 < count else []
            arrived = self._exchange(send=[(self._before, gradient)], receive=coming)
            received = arrived[0] if arrived else None
        while in_flight:
            (gradient,) = self._exchange(receive=[(self._after, shape(in_flight[0][0]))])
            self._exchange(send=[(self._before, back(gradient))])

    def _exchange(
        self,
        send: list[tuple[int | None, Tensor | None]] | None = None,
        receive: list[tuple[int | None, tuple[int, ...]]] | None = None,
    ) -> list[Tensor | None]:
        """Send and receive at once, or neighbours would wait for each other."""
        operations: list[dist.P2POp] = []
        buffers: list[Tensor | None] = []
        for peer, tensor in send or []:
            if peer is not None and tensor is not None:
                operations.append(dist.P2POp(dist.isend, tensor.detach().contiguous(), peer, self._groups.pipeline))
        for peer, shape in receive or []:
            buffer = None if peer is None else torch.empty(shape, dtype=self._dtype, device=self._device)
            if buffer is not None:
                operations.append(dist.P2POp(dist.irecv, buffer, peer, self._groups.pipeline))
            buffers.append(buffer)
        if operations:
            for work in dist.batch_isend_irecv(operations):
                work.wait()
        return buffers
