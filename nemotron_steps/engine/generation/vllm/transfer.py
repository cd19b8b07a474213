"""Weights into a vLLM engine, through vLLM's weight-transfer API.

An engine that is here is given the policy's tensors by reference. Workers elsewhere take up an offer of the policy's
ranks (weight_sync), or of this process: by CUDA IPC, and on CPU by gloo. What runs inside the workers is worker.py.
"""

from __future__ import annotations

import os
import socket
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch.storage import TypedStorage, UntypedStorage

from nemotron_steps.engine.weight_sync.transfer import Bucket, ChannelHandles, Entry, Offer, StreamSender, WeightPlan
from nemotron_steps.engine.workers.workers import serve_store
from nemotron_steps.errors import RESUME, WorkerLostError
from nemotron_steps.waiting import waiting

Weights = Iterable[tuple[str, torch.Tensor]]

IN_PROCESS = "nemotron_steps_in_process"
OFFERED = "nemotron_steps_offered"
"""Names of the backends at vLLM's factory."""
_LOOPBACK = "127.0.0.1"
FIRST_SECONDS, LATER_SECONDS = 960.0, 180.0
"""For one call of the workers, before and after the first transfer, which may wait for its sender."""

LOOK_SECONDS = 1.0
"""How often a wait looks whether an engine in a process of its own lives: vLLM's client would wait for it for ever."""
_RESUMED = f"{RESUME}   # goes on from the last checkpoint"
Answer = TypeVar("Answer")

HANDED_OVER: dict[str, Iterator[tuple[str, torch.Tensor]]] = {}
"""Weights on their way to the worker of this process. Filled and emptied within one `hand_over`."""


def hand_over(engine: Any, weights: Weights) -> int:
    """Load Hugging Face-named weights into an engine whose worker lives here. Returns the bytes handed over."""
    moved = 0

    def counted() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal moved
        for name, tensor in weights:
            moved += tensor.numel() * tensor.element_size()
            yield name, tensor.detach()

    HANDED_OVER["weights"] = counted()
    try:
        engine.collective_rpc("start_weight_update")
        engine.collective_rpc("update_weights", kwargs={"update_info": {"channel": "weights"}})
        engine.collective_rpc("finish_weight_update")
    finally:
        HANDED_OVER.pop("weights", None)
    return moved


class WorkersTransfer:
    """Weights to the workers of an engine that are processes of their own; with `own_process`, the engine as a whole
    is."""

    def __init__(self, engine: Any, workers: int, *, own_process: bool) -> None:
        self._engine, self._workers, self._own_process, self._loaded = engine, workers, own_process, False
        self._local: _LocalSender | None = None

    def load(self, weights: Weights | ChannelHandles) -> int:
        """Load Hugging Face-named weights in one call of the workers, between two of which a scheduler in another
        process would sample; every worker keeps its shard. Returns the bytes received, over all workers.
        WorkerLostError when one died, or did not answer within FIRST_SECONDS or LATER_SECONDS."""
        sending: AbstractContextManager[None] = nullcontext()
        if isinstance(weights, ChannelHandles):
            offered = weights
        else:
            if self._local is None:
                from nemotron_steps.engine.policy.distributed.parallel_dims import device  # as the receivers

                weights = list(weights)  # read once for the plan, once to send
                self._local = _LocalSender(WeightPlan.of(weights), self._workers, device())
                self.open_channel(self._local.offered)
            offered, sending = self._local.offered, self._local.sending(iter(weights))
        with sending:
            self._call("load_offered", channel=offered.channel)
        self._loaded = True
        return offered.bytes

    def open_channel(self, offered: ChannelHandles) -> None:
        """Open a channel in every worker; `load` reads from it. WorkerLostError as `load`."""
        self._call(
            "init_weight_transfer_engine", init_info={"channel": offered.channel, "handles": to_plain(offered.offers)}
        )

    def _call(self, method: str, **arguments: Any) -> None:
        seconds = LATER_SECONDS if self._loaded else FIRST_SECONDS
        with self.alive():
            if self._own_process:
                call(self._engine, lambda: self._engine.collective_rpc(method, kwargs=arguments), seconds)
            else:
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


class _LocalSender:
    """This process's weights, offered to an engine's workers on the same machine, which share the device of CUDA
    ones."""

    def __init__(self, plan: WeightPlan, workers: int, device: torch.device) -> None:
        channel = uuid.uuid4().hex
        names = [f"{channel}/{number}" for number in range(workers)]
        self._store, port = serve_store(_LOOPBACK)
        shared, broadcast = ([], names) if device.type == "cpu" else (names, [])
        self._stream = StreamSender(plan, self._store, channel, ipc=shared, broadcast=broadcast, device=device)
        offer = replace(self._stream.offer(), address=(_LOOPBACK, port))
        places = [(1 + number, 1 + workers) if broadcast else None for number in range(workers)]
        offers = [replace(offer, name=name, place=place) for name, place in zip(names, places, strict=True)]
        self.offered = ChannelHandles(channel, tuple(offers))

    @contextmanager
    def sending(self, weights: Iterator[tuple[str, torch.Tensor]]) -> Iterator[None]:
        """Send while the block has the workers receive. What stops the sender is raised, not what that causes."""
        problem: list[BaseException] = []

        def send() -> None:
            try:
                self._stream.send(weights)
            except BaseException as error:
                problem.append(error)

        sender = threading.Thread(target=send, name="weights to vLLM", daemon=True)
        sender.start()
        try:
            yield
        except Exception:
            if problem:
                raise problem[0] from None
            raise
        sender.join()
        if problem:
            raise problem[0]


def wait_for_output(llm: Any) -> None:
    """Wait until the engine has sent something that `llm.step()` can take. WorkerLostError when it is dead."""
    arrived = llm.engine_core.outputs_queue
    while True:
        with arrived.not_empty:
            if arrived.not_empty.wait_for(lambda: arrived.queue, timeout=LOOK_SECONDS):
                return
        if is_dead(llm):
            raise lost_engine("it ended while samples were running")


def call(llm: Any, function: Callable[[], Answer], seconds: float) -> Answer:
    """What a call of the engine answers. WorkerLostError when it died, or did not answer within `seconds`."""
    answer: Future[Answer] = Future()

    def run() -> None:
        try:
            answer.set_result(function())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=run, name="call of vLLM", daemon=True).start()
    waited = 0.0
    with waiting("an answer of the vLLM engine", seconds):
        while not wait([answer], LOOK_SECONDS).done:
            waited += LOOK_SECONDS
            if is_dead(llm):
                raise lost_engine("it ended while it was asked for something")
            if waited >= seconds:
                raise lost_engine(f"it has not answered for {seconds:.0f} s")
    return answer.result()


def is_dead(llm: Any) -> bool:
    """Whether vLLM's client has lost its engine, or the process has ended."""
    resources = llm.engine_core.resources
    processes = getattr(resources.engine_manager, "processes", ())
    return bool(resources.engine_dead) or any(process.exitcode is not None for process in processes)


def lost_engine(found: str) -> WorkerLostError:
    """What to say of it."""
    where = f"a child of process {os.getpid()} on {socket.gethostname()}"
    return WorkerLostError("the process of a vLLM engine is lost", where=where, found=found, hints=[_RESUMED])


def lost_worker(engine: Any, error: Exception) -> WorkerLostError | None:
    """What an engine's failure says about its tensor-parallel workers; None when they are alive and answer."""
    workers = getattr(getattr(engine, "model_executor", None), "workers", None)
    if workers is None:
        from vllm.v1.engine.exceptions import EngineDeadError

        return lost_engine(str(error).splitlines()[0]) if isinstance(error, EngineDeadError) else None
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
        hints=[_RESUMED],
    )


_CLASSES = (Offer, WeightPlan, Bucket, Entry, torch.Tensor, TypedStorage, UntypedStorage)
"""What handles of weights are made of; a CUDA IPC handle names the last three."""
_BY_NAME = {kind.__name__: kind for kind in _CLASSES}


def to_plain(value: Any) -> Any:
    """A handle as numbers, strings, bytes, lists and mappings alone: it reaches an engine in another process without
    pickle."""
    if isinstance(value, type):
        return {"class": value.__name__}
    if is_dataclass(value):
        return {"object": type(value).__name__, **{f.name: to_plain(getattr(value, f.name)) for f in fields(value)}}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    return [to_plain(each) for each in value] if isinstance(value, tuple | list) else value


def from_plain(plain: Any) -> Any:
    """The inverse of `to_plain`, sequences being tuples."""
    if isinstance(plain, Mapping):
        if "object" in plain:
            return _BY_NAME[plain["object"]](**{name: from_plain(v) for name, v in plain.items() if name != "object"})
        return _BY_NAME[plain["class"]] if "class" in plain else getattr(torch, plain["dtype"])
    return tuple(from_plain(each) for each in plain) if isinstance(plain, list) else plain
