"""An actor with a name: how it is called, waited for, and what it means when it fails.

A worker's own errors arrive as they were raised. A worker that died, or has not answered for SILENT_SECONDS, is a
WorkerLostError with its name and its last log lines, whoever waits for it. Not for: starting Ray (cluster.py).
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import re
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from nemotron_steps.config.locations import of_launcher
from nemotron_steps.errors import RESUME, EngineError, StepsError, WorkerLostError, first_line
from nemotron_steps.waiting import waiting

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore


_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """From now on the kernel kills this process when the thread that started it ends. Does nothing elsewhere."""
    parent = os.getppid()
    try:
        prctl = ctypes.CDLL(None, use_errno=True).prctl
    except (OSError, AttributeError):  # no Linux
        return
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended in between
        os.kill(os.getpid(), signal.SIGKILL)


def bind_port(host: str) -> socket.socket:
    """A socket bound to a free port of one address."""
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        bound.bind((host, 0))
    except OSError as error:
        bound.close()
        raise EngineError("no port could be bound", where=host, found=str(error)) from error
    return bound


def serve_store(host: str) -> tuple[TCPStore, int]:
    """A store served by this process on one address, and its port."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    bound = bind_port(host)
    port = int(bound.getsockname()[1])
    store = TCPStore(
        host, port, None, is_master=True, wait_for_workers=False, master_listen_fd=bound.detach(), use_libuv=True
    )
    return store, port


def join_store(host: str, port: int, timeout_s: float = 60.0) -> TCPStore:
    """A connection to a store that another process serves; torch retries until the timeout."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    return TCPStore(host, port, None, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))


START_SECONDS = 180.0
"""An actor's process starts and imports within this time."""
SILENT_SECONDS = 40.0
"""A worker that answers no ping for this long is lost: with the wait before the first ping, within a minute."""
PING_SECONDS = 10.0
"""A longer call is accompanied by pings."""
_LOG_LINES = 12
HEALTH = "health"
"""Concurrency group of pings and of other calls that must not wait."""


class WorkerProcess:
    """Base of every actor's class. Its methods run one at a time; in subclasses with coroutines, those may overlap."""

    THREADS: ClassVar[tuple[str, ...]] = (HEALTH,)
    """Concurrency groups: calls that run beside the others, one at a time each."""

    def describe(self, *, device: bool) -> dict[str, Any]:
        """Who and where this process is; `device`: with the identity of its GPU (imports torch)."""
        import ray

        for name in of_launcher():  # of a pod that the cluster's node was started in
            del os.environ[name]
        stderr = f"/proc/{os.getpid()}/fd/2"
        log = os.readlink(stderr) if os.path.islink(stderr) else ""  # the file that Ray redirected it to
        devices: tuple[str, ...] = ()
        if device:
            import torch

            count = torch.cuda.device_count() if torch.cuda.is_available() else 0
            devices = tuple(str(torch.cuda.get_device_properties(number).uuid) for number in range(count))
        return {
            "pid": os.getpid(),
            "host": ray.util.get_node_ip_address(),  # type: ignore[no-untyped-call]
            "node": ray.get_runtime_context().get_node_id(),
            "log": log if os.path.isfile(log) else "",
            "devices": devices,
            "gpus": tuple(ray.get_runtime_context().get_accelerator_ids().get("GPU", ())),
        }

    def ping(self) -> None:
        """Answer."""


@dataclass(frozen=True)
class Worker:
    """A handle that other actors may be given."""

    name: str
    actor: Any
    pid: int = 0
    host: str = ""
    node: str = ""
    log: str = ""
    devices: tuple[str, ...] = ()
    """Identities of the GPUs it sees, in CUDA's order; none on CPU."""
    gpus: tuple[str, ...] = ()
    """The same as CUDA_VISIBLE_DEVICES of its node names them, as far as Ray assigned them."""

    @property
    def device(self) -> str | None:
        """Its first GPU; None on CPU."""
        return self.devices[0] if self.devices else None

    def call(self, method: str, *arguments: Any) -> Any:
        """Start a call; the result is an object reference."""
        return getattr(self.actor, method).remote(*arguments)

    def beside(self, method: str, *arguments: Any, thread: str = HEALTH) -> Any:
        """Start a call that does not wait for the worker's other calls."""
        return getattr(self.actor, method).options(concurrency_group=thread).remote(*arguments)

    def lost(self, cause: str) -> WorkerLostError:
        """What to raise when this worker is gone: with its last log lines, where they are on this machine."""
        lines: list[str] = []
        for path in (Path(self.log).with_suffix(".out"), Path(self.log)) if self.log else ():
            if path.is_file():
                text = path.read_bytes()[-8000:].decode(errors="replace")
                lines += [line for line in text.splitlines() if line.strip() and not line.startswith(":")]
        said = "".join(f"\n    {line}" for line in lines[-_LOG_LINES:])
        return WorkerLostError(
            f"the worker `{self.name}` is lost",
            where=f"process {self.pid} on {self.host}" + (f", log {self.log}" if self.log else ""),
            expected="a living process",
            found=f"{cause}; its last log lines:{said}" if said else cause,
            hints=[f"{RESUME}   # goes on from the last checkpoint"],
        )


def places(workers: Sequence[Worker]) -> dict[str, str]:
    """Each worker's process and device by its name, for the journal."""
    return {w.name: f"process {w.pid} on {w.host}" + "".join(f", {device}" for device in w.devices) for w in workers}


def start_workers(
    process: type[WorkerProcess],
    names: Sequence[str],
    options: Sequence[Mapping[str, Any]],
    arguments: Sequence[Any] = (),
    *,
    device: bool = True,
) -> list[Worker]:
    """Start one actor a name and wait until all of them answer."""
    import ray

    threads = {"concurrency_groups": dict.fromkeys(process.THREADS, 1)}
    remote: Any = ray.remote
    actors = [remote(max_restarts=0, **own, **threads)(process).remote(*arguments) for own in options]
    unknown = [Worker(name, actor) for name, actor in zip(names, actors, strict=True)]
    calls = [worker.actor.describe.remote(device=device) for worker in unknown]
    deadline = time.monotonic() + START_SECONDS
    started = []
    try:
        for worker, call in zip(unknown, calls, strict=True):
            about = result_of(call, worker, timeout_s=max(1.0, deadline - time.monotonic()))
            started.append(Worker(worker.name, worker.actor, **about))
    except BaseException:
        stop_workers(unknown)
        raise
    return started


def stop_workers(workers: Sequence[Worker]) -> None:
    """End actors at once; dead ones, and those of a cluster that is gone, are ignored."""
    import ray

    if ray.is_initialized():
        for worker in workers:
            ray.kill(worker.actor, no_restart=True)


def result_of(reference: Any, worker: Worker, timeout_s: float | None = None) -> Any:
    """The result of one call, or the error it means."""
    import ray

    try:
        with waiting(f"an answer of {worker.name}", timeout_s):
            return ray.get(reference, timeout=timeout_s)
    except ray.exceptions.RayError as error:
        raise meaning(error, worker) from None


def meaning(error: Exception, worker: Worker) -> StepsError:
    """The error of this package that a failed call stands for."""
    import ray

    if isinstance(error, ray.exceptions.RayTaskError):
        cause = error.cause
        if isinstance(cause, StepsError):
            return cause
        if isinstance(cause, ray.exceptions.RayError):
            return worker.lost(_said(cause))
        text = re.sub(r"\x1b\[[0-9;]*m", "", str(error))  # Ray colours it
        trace = "\n".join(f"    {line}" for line in text.splitlines()[-8:])
        return EngineError(
            f"the worker `{worker.name}` failed",
            where=f"process {worker.pid} on {worker.host}, log {worker.log}",
            found=f"{type(cause).__name__}: {cause}\n{trace}",
        )
    if isinstance(error, ray.exceptions.GetTimeoutError):
        return worker.lost("it did not answer in time")
    return worker.lost(_said(error))


def settle(calls: Mapping[Any, Worker]) -> list[Any]:
    """The results of calls that may depend on each other (a collective), in order."""
    import ray

    left = list(calls)
    pings: dict[str, tuple[Any, float]] = {}
    with waiting(", ".join([worker.name for worker in calls.values()][:3]) + (", ..." if len(calls) > 3 else "")):
        while left:
            done, left = ray.wait(left, num_returns=1, timeout=PING_SECONDS)
            for reference in done:
                try:
                    ray.get(reference)
                except ray.exceptions.RayError as error:
                    problem = meaning(error, calls[reference])
                    # When a rank dies, the others fail as well, and perhaps sooner: name the one that died.
                    if not isinstance(error, ray.exceptions.RayTaskError) or type(problem) is not EngineError:
                        raise problem from None
                    raise _death_among(left, calls) or problem from None
            if not done:
                _check_pings([calls[reference] for reference in left], pings)
    return [ray.get(reference) for reference in calls]


async def answer(reference: Any, worker: Worker) -> Any:
    """Await the result of one call; as `settle` otherwise."""
    import ray

    future = asyncio.wrap_future(reference.future())
    with waiting(worker.name):
        while True:
            done, _ = await asyncio.wait({future}, timeout=PING_SECONDS)
            if done:
                try:
                    return future.result()
                except ray.exceptions.RayError as error:
                    raise meaning(error, worker) from None
            ping = asyncio.wrap_future(worker.beside("ping").future())
            done, _ = await asyncio.wait({future, ping}, timeout=SILENT_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                raise worker.lost(f"it has not answered for {SILENT_SECONDS:.0f} s")


def _check_pings(workers: Sequence[Worker], pings: dict[str, tuple[Any, float]]) -> None:
    import ray

    for worker in workers:
        if worker.name not in pings:
            pings[worker.name] = (worker.beside("ping"), time.monotonic())
        reference, since = pings[worker.name]
        if ray.wait([reference], timeout=0)[0]:
            result_of(reference, worker)
            del pings[worker.name]
        elif time.monotonic() - since > SILENT_SECONDS:
            raise worker.lost(f"it has not answered for {SILENT_SECONDS:.0f} s")


def _death_among(references: Sequence[Any], calls: Mapping[Any, Worker]) -> WorkerLostError | None:
    import ray

    deadline = time.monotonic() + 3.0
    others = list(references)
    while others and (left := deadline - time.monotonic()) > 0:
        done, others = ray.wait(others, num_returns=1, timeout=left)
        for reference in done:
            try:
                ray.get(reference)
            except ray.exceptions.RayTaskError:
                continue
            except ray.exceptions.RayError as error:
                return calls[reference].lost(_said(error))
    return None


def _said(error: Exception) -> str:
    """The line of one of Ray's errors that says why."""
    text = str(error).strip()
    for line in text.splitlines():
        if "exit type" in line or "exit detail" in line:
            return line.strip().split(" Some common causes")[0]
    if "creation task" in text:  # its constructor or an import failed: the last line names the exception
        return text.splitlines()[-1].strip()
    return first_line(error)


class RankWorker(WorkerProcess):
    """One rank, inside an actor. Methods are called on all ranks in the same order."""

    def serve_store(self, host: str) -> int:
        """Rank 0: serve the store that the ranks meet at; returns its port."""
        self._served, port = serve_store(host)
        return port

    def join(self, rank: int, ranks: int, host: str, port: int) -> None:
        """Become a rank of torch.distributed's world."""
        import torch
        import torch.distributed as dist

        self._rank, self._address = rank, (host, port)
        store = dist.PrefixStore("ranks", join_store(host, port))  # type: ignore[attr-defined]
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=ranks)

    def _answer(self, value: Any) -> Any:
        """What rank 0 answers; the others answer nothing."""
        return value if self._rank == 0 else None


class RankGroup:
    """The ranks, from the process that asks them."""

    def __init__(
        self, name: str, process: type[RankWorker], options: Sequence[Mapping[str, Any]], *, local: bool
    ) -> None:
        names = [f"{name} rank {rank}" for rank in range(len(options))]
        self.workers: list[Worker] = start_workers(process, names, options)
        first = self.workers[0]
        host = "127.0.0.1" if local else first.host
        self.address = (host, int(result_of(first.call("serve_store", host), first, timeout_s=START_SECONDS)))
        ranks = len(self.workers)
        settle({worker.call("join", rank, ranks, *self.address): worker for rank, worker in enumerate(self.workers)})

    def calls(self, method: str, *arguments: Any) -> dict[Any, Worker]:
        """Start a method on every rank: for `settle`, whose first result is rank 0's."""
        return {worker.call(method, *arguments): worker for worker in self.workers}

    def everywhere(self, method: str, *arguments: Any) -> Any:
        """Rank 0's answer, once all ranks have one."""
        return settle(self.calls(method, *arguments))[0]

    def close(self) -> None:
        """End the ranks."""
        stop_workers(self.workers)
