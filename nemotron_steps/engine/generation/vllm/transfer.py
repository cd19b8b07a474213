"""Weights into a vLLM engine of this process, through vLLM's weight-transfer API.

    one worker          lives here as well: `InProcessTransfer` is given the policy's tensors by reference
    tensor-parallel     processes of their own: each takes up an offer of the policy's ranks (weight_sync), or maps a
                        shared-memory segment that this process fills

What runs inside the workers is vllm_worker.py.
"""

from __future__ import annotations

import socket
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from nemotron_steps.engine.weight_sync.offers import SHARED_MEMORY, OfferedWeights, ReceivingOffer
from nemotron_steps.engine.weight_sync.plan import WeightPlan
from nemotron_steps.engine.weight_sync.shared_memory import SegmentWriter
from nemotron_steps.errors import WorkerLostError

Weights = Iterable[tuple[str, torch.Tensor]]

IN_PROCESS = "nemotron_steps_in_process"
OFFERED = "nemotron_steps_offered"
"""Names of the backends at vLLM's factory."""
FIRST_SECONDS, LATER_SECONDS = 960.0, 180.0
"""For one call of the tensor-parallel workers, before and after the first transfer, which may wait for its sender."""

_handed_over: dict[str, Iterator[tuple[str, torch.Tensor]]] = {}
"""Weights on their way to the worker of this process, by ticket. Filled and emptied within one `hand_over`."""


def take(ticket: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The worker's side of `hand_over`."""
    return _handed_over.pop(ticket)


def hand_over(engine: Any, weights: Weights) -> int:
    """Load Hugging Face-named weights into an engine whose worker lives here. Returns the bytes handed over."""
    moved = 0

    def counted() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal moved
        for name, tensor in weights:
            moved += tensor.numel() * tensor.element_size()
            yield name, tensor.detach()

    _handed_over["weights"] = counted()
    try:
        engine.collective_rpc("start_weight_update")
        engine.collective_rpc("update_weights", kwargs={"update_info": {"ticket": "weights"}})
        engine.collective_rpc("finish_weight_update")
    finally:
        _handed_over.pop("weights", None)
    return moved


class WorkersTransfer:
    """Weights to the tensor-parallel workers of an engine.

    Args:
        engine: its executor is vLLM's multi-process one.
        workers: how many.
    """

    def __init__(self, engine: Any, workers: int) -> None:
        self._engine, self._workers, self._loaded = engine, workers, False
        self._segment: tuple[OfferedWeights, SegmentWriter] | None = None

    def load(self, weights: Weights | OfferedWeights) -> int:
        """Load Hugging Face-named weights; every worker keeps its shard. Returns the bytes received, over all workers.

        Raises:
            WorkerLostError: a worker died, or did not answer within FIRST_SECONDS or LATER_SECONDS.
        """
        if isinstance(weights, OfferedWeights):
            offered = weights
        else:
            offered = self._write(weights)
        self._call("start_weight_update")
        self._call("update_weights", update_info={"channel": offered.channel})
        self._call("finish_weight_update")
        self._loaded = True
        return offered.bytes

    def take_up(self, offered: OfferedWeights) -> None:
        """Open a channel in every worker; `load` reads from it. WorkerLostError as `load`."""
        self._call("init_weight_transfer_engine", init_info=vars(offered))

    def _call(self, method: str, **arguments: Any) -> None:
        seconds = LATER_SECONDS if self._loaded else FIRST_SECONDS
        with self.alive():
            self._engine.collective_rpc(method, timeout=seconds, kwargs=arguments)

    @contextmanager
    def alive(self) -> Iterator[None]:
        """A failure that comes from a dead or silent worker is a WorkerLostError that names it."""
        try:
            yield
        except Exception as error:
            lost = lost_worker(self._engine, error)
            if lost is None:
                raise
            raise lost from error

    def _write(self, weights: Weights) -> OfferedWeights:
        """Put weights of this process where every worker can map them."""
        if self._segment is None:
            kept = [(name, tensor.detach().cpu()) for name, tensor in weights]  # read once for the plan, once to send
            plan, weights = WeightPlan.of(kept), kept
            segment = SegmentWriter(plan)
            offer = ReceivingOffer(SHARED_MEMORY, (plan, segment.path))
            self._segment = OfferedWeights(uuid.uuid4().hex, (offer,) * self._workers), segment
            try:
                self.take_up(self._segment[0])
            finally:  # memory under a name would outlive every process
                segment.unlink()
        offered, segment = self._segment
        segment.write(iter(weights))
        return offered


def lost_worker(engine: Any, error: Exception) -> WorkerLostError | None:
    """What an engine's failure says about its tensor-parallel workers; None when they are alive and answer."""
    workers = getattr(getattr(engine, "model_executor", None), "workers", None)
    if workers is None:
        return None
    codes = [worker.proc.exitcode for worker in workers]
    # When one dies, vLLM ends the others: by a signal of its own, or so that they leave without an error.
    dead = [rank for rank, code in enumerate(codes) if code not in (None, 0, -15)] or [
        rank for rank, code in enumerate(codes) if code is not None
    ]
    if dead:
        process, cause = workers[dead[0]].proc, f"it ended with exit code {codes[dead[0]]}"
        name, where = f"tensor-parallel worker {dead[0]}", f"process {process.pid} on {socket.gethostname()}"
    elif isinstance(error, TimeoutError):
        name, cause = "one of the tensor-parallel workers", str(error)
        where = f"processes {', '.join(str(worker.proc.pid) for worker in workers)} on {socket.gethostname()}"
    else:
        return None
    return WorkerLostError(
        f"{name} of a vLLM engine is lost",
        where=where,
        expected=f"{len(workers)} living processes (policy.generation.vllm_cfg.tensor_parallel_size)",
        found=cause,
        hints=["steps run ... --resume RUN    # goes on from the last checkpoint"],
    )
