"""A `Generator` whose engines live in actors and decode continuously; the driver only passes requests and results.

A request goes whole to one worker: to the one that has the KV cache of the conversation's last turn, while it has few
more pending samples than others; else to the one with the fewest. Conversations are told apart by hashes of whole
blocks of tokens, of which the newest are remembered.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from nemotron_steps.config.schema.grpo import AsyncGrpoConfig
from nemotron_steps.config.schema.policy import GenerationConfig
from nemotron_steps.engine.placement.policy_group import PlacedWeights
from nemotron_steps.engine.types import Completion, GenerationRequest, Generator, WeightSyncReport
from nemotron_steps.engine.weight_sync.transfer import WeightTransfer
from nemotron_steps.engine.workers.workers import (
    SILENT_SECONDS,
    Worker,
    WorkerProcess,
    result_of,
    settle,
    start_workers,
    stop_workers,
)

if TYPE_CHECKING:
    from nemotron_steps.engine.generation.vllm.generator import VllmGenerator
    from nemotron_steps.engine.weight_sync.transfer import ChannelHandles, Offer, StreamReceiver

COLLECT_SECONDS = 1.0
"""A worker answers `collect` after this time even when nothing has finished, which shows that it lives."""
STEP_SECONDS = 0.003
"""`step` waits this long when nothing has arrived, so that its caller's loop neither spins nor stalls."""
AFFINITY_MARGIN = 16
"""A conversation's next turn may leave its engine with this many more pending samples than the least loaded has."""


BLOCK = 16
"""Tokens hashed at once."""
CONVERSATIONS = 2**15


@dataclass(frozen=True)
class GeneratorSettings:
    """Arguments of setup.backends' build_generator."""

    hf_folder: Path
    config: GenerationConfig
    max_total_length: int
    precision: str
    asynchronous: AsyncGrpoConfig | None
    record_routed_experts: bool = False


class GenerationWorker(WorkerProcess):
    """One generator inside an actor. It decodes in a thread of its own, without being asked to, and takes commands
    (requests, cancellations, weights) between two steps. Ray runs `collect` beside its other methods."""

    def __init__(self, settings: GeneratorSettings) -> None:
        self._settings = settings
        self._receiving: StreamReceiver | ChannelHandles | None = None
        self._generator: Generator | None = None
        self._commands: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any] | None]] = queue.SimpleQueue()
        self._arrived = threading.Condition()
        self._finished: list[Completion] = []
        self._error: Exception | None = None
        threading.Thread(target=self._run, name="decode", daemon=True).start()

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests. A refused one fails the next `collect`."""
        for request in requests:
            self._commands.put((partial(self._submit, request), None))

    def _submit(self, request: GenerationRequest) -> None:
        self._built().submit(request)

    def cancel(self, request_id: str) -> None:
        """Drop a request."""
        self._commands.put((lambda: self._built().cancel(request_id), None))

    def collect(self, wait_s: float) -> tuple[int, list[Completion]]:
        """Tokens sampled so far, and completions since the last call; waits for the first one, at most wait_s."""
        with self._arrived:
            self._arrived.wait_for(lambda: self._finished or self._error, timeout=wait_s)
            if self._error is not None:
                raise self._error
            finished, self._finished = self._finished, []
            return (self._generator.sampled_tokens if self._generator is not None else 0), finished

    def finish_generation(self) -> None:
        """See Generator."""
        self._between_steps(lambda: self._built().finish_generation())

    def open_receiver(self, channel: str, offers: Sequence[Offer]) -> None:
        """Get ready to receive: here, or in each of the generator's own processes."""
        self._between_steps(lambda: self._open(channel, tuple(offers)))

    def _open(self, channel: str, offers: tuple[Offer, ...]) -> None:
        from nemotron_steps.engine.generation.vllm.engine import runs_elsewhere
        from nemotron_steps.engine.weight_sync.transfer import ChannelHandles, StreamReceiver

        settings = self._settings.config
        if settings.backend != "vllm" or not runs_elsewhere(settings.vllm_cfg):
            (offer,) = offers
            self._receiving = StreamReceiver.of(offer)
            return
        # Its own processes take up their offers now.
        self._receiving = ChannelHandles(channel, offers)
        if self._generator is None:
            self._build(self._receiving)
        else:
            self._elsewhere().open_channel(self._receiving)

    def load(self) -> None:
        """Build the generator with the weights of its folder."""
        self._between_steps(lambda: self._build(None))

    def update_weights(self, version: int) -> int:
        """Load what the policy sends; the first time, build the generator with it. Returns the bytes received."""
        return int(self._between_steps(lambda: self._load(version)))

    def _load(self, version: int) -> int:
        from nemotron_steps.engine.weight_sync.transfer import StreamReceiver

        receiving = self._receiving
        if not isinstance(receiving, StreamReceiver):
            assert receiving is not None
            return self._elsewhere().update_weights(receiving, version).bytes
        if self._generator is None:
            self._build(receiving.weights())
            self._built().weight_version = version
        else:
            self._generator.update_weights(receiving.weights(), version)
        return receiving.bytes

    def _build(self, weights: Any) -> None:
        from nemotron_steps.engine.setup.backends import build_generator
        from nemotron_steps.models.chat import ChatFormat

        given = dict(vars(self._settings))
        folder, config = given.pop("hf_folder"), given.pop("config")
        self._generator = build_generator(folder, config, ChatFormat.from_folder(folder), weights=weights, **given)

    def _built(self) -> Generator:
        assert self._generator is not None, "weights come before requests"
        return self._generator

    def _elsewhere(self) -> VllmGenerator:
        """The only one with processes of its own, which is given offers instead of weights."""
        from nemotron_steps.engine.generation.vllm.generator import VllmGenerator

        generator = self._built()
        assert isinstance(generator, VllmGenerator)
        return generator

    def _between_steps(self, command: Callable[[], Any]) -> Any:
        done: Future[Any] = Future()
        self._commands.put((command, done))
        while not wait([done], 1.0).done:
            if self._error is not None:
                raise self._error
        return done.result()

    def _run(self) -> None:
        try:
            while True:
                idle = self._generator is None or self._generator.pending() == 0
                if idle or not self._commands.empty():
                    self._obey(*self._commands.get())
                    continue
                assert self._generator is not None
                finished = self._generator.step()
                if finished:
                    with self._arrived:
                        self._finished += finished
                        self._arrived.notify_all()
        except Exception as error:
            with self._arrived:
                self._error = error
                self._arrived.notify_all()

    def _obey(self, command: Callable[[], Any], done: Future[Any] | None) -> None:
        if done is None:
            command()
            return
        try:
            done.set_result(command())
        except Exception as error:  # belongs to whoever gave the command
            done.set_exception(error)


@dataclass
class _Engine:
    """One worker, as the driver sees it."""

    worker: Worker
    outbox: list[GenerationRequest] = field(default_factory=list)
    pending: int = 0
    sampled_tokens: int = 0
    collecting: Any = None
    asked_at: float = 0.0


@dataclass
class _Open:
    """A request that has unfinished samples."""

    engine: _Engine
    prompt_ids: Sequence[int]
    unfinished: int


class RayGenerator:
    """See the module docstring."""

    def __init__(
        self, settings: GeneratorSettings, options: Sequence[Mapping[str, Any]], *, name: str = "generator"
    ) -> None:
        self.weight_version = 0
        self._config = settings.config
        names = [f"{name} {number}" for number in range(len(options))]
        self.workers = start_workers(GenerationWorker, names, options, [settings])
        self._engines = [_Engine(worker) for worker in self.workers]
        self._open: dict[str, _Open] = {}
        self._homes: OrderedDict[int, _Engine] = OrderedDict()
        """Hash of a conversation that an engine has just read or sampled → that engine."""
        self._transfer: WeightTransfer | None = None

    def submit(self, request: GenerationRequest) -> None:
        """See Generator. The request leaves with the next `step`."""
        least = min(self._engines, key=lambda e: e.pending)
        known = (self._homes[key] for key in reversed(_hashes(request.prompt_ids)) if key in self._homes)
        engine = next(known, least)
        if engine.pending - least.pending > max(0, AFFINITY_MARGIN - request.n):
            engine = least
        engine.outbox.append(request)
        engine.pending += request.n
        self._open[request.request_id] = _Open(engine, request.prompt_ids, request.n)

    def step(self) -> list[Completion]:
        """What has finished since the last call. Never waits longer than STEP_SECONDS."""
        import ray

        for engine in self._engines:
            if engine.outbox:
                engine.worker.call("submit", engine.outbox)
                engine.outbox = []
            if engine.pending and engine.collecting is None:
                engine.collecting = engine.worker.beside("collect", COLLECT_SECONDS)
                engine.asked_at = time.monotonic()
        asked = {engine.collecting: engine for engine in self._engines if engine.collecting is not None}
        if not asked:
            return []
        done, others = ray.wait(list(asked), num_returns=1, timeout=STEP_SECONDS)
        done += ray.wait(others, num_returns=len(others), timeout=0)[0] if done and others else []
        finished: list[Completion] = []
        for reference in done:
            engine = asked[reference]
            engine.collecting = None
            engine.sampled_tokens, completions = result_of(reference, engine.worker)
            finished += [completion for completion in completions if self._note(completion)]
        for engine in self._engines:
            if engine.collecting is not None and time.monotonic() - engine.asked_at > SILENT_SECONDS:
                raise engine.worker.lost(f"it has not answered for {SILENT_SECONDS:.0f} s")
        return finished

    @property
    def sampled_tokens(self) -> int:
        """See Generator. What the workers had sampled when they last answered."""
        return sum(engine.sampled_tokens for engine in self._engines)

    def pending(self) -> int:
        """See Generator."""
        return sum(engine.pending for engine in self._engines)

    def cancel(self, request_id: str) -> None:
        """See Generator."""
        if request_id not in self._open:
            return
        request = self._open.pop(request_id)
        engine = request.engine
        engine.pending -= request.unfinished
        kept = [waiting for waiting in engine.outbox if waiting.request_id != request_id]
        if len(kept) == len(engine.outbox):
            engine.worker.call("cancel", request_id)
        engine.outbox = kept

    def finish_generation(self) -> None:
        """See Generator."""
        settle({worker.call("finish_generation"): worker for worker in self.workers})

    def load(self) -> None:
        """Take the weights from the model's folder, for a generator without a policy."""
        settle({worker.call("load"): worker for worker in self.workers})

    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> WeightSyncReport:
        """See Generator. A placed policy's weights go from its ranks to the workers."""
        started = time.perf_counter()
        assert isinstance(weights, PlacedWeights)
        if self._transfer is None:
            self._transfer = weights.policy.transfer_to(self.workers, self._config.devices_per_generator)
        moved = self._transfer.update(version)
        self.weight_version = version
        self._homes.clear()  # as the engines do: their caches were of the old weights
        return WeightSyncReport(version, time.perf_counter() - started, moved)

    @property
    def transports(self) -> list[str]:
        """How weights reach each worker; empty before the first update."""
        return [transport for transport, _ in self._transfer.transports] if self._transfer is not None else []

    def close(self) -> None:
        """End the workers."""
        stop_workers(self.workers)

    def _note(self, completion: Completion) -> bool:
        """Count a completion off; False when its request was cancelled meanwhile."""
        if completion.request_id not in self._open:
            return False
        request = self._open[completion.request_id]
        request.engine.pending -= 1
        request.unfinished -= 1
        if not request.unfinished:
            del self._open[completion.request_id]
        # Prompts alone are not remembered: the rollouts of one prompt would all follow the first of them.
        for key in _hashes([*request.prompt_ids, *completion.token_ids])[-1:]:
            self._homes[key] = request.engine
            self._homes.move_to_end(key)
            if len(self._homes) > CONVERSATIONS:
                self._homes.popitem(last=False)
        return True


def _hashes(tokens: Sequence[int]) -> list[int]:
    """Of the first 1, 2, ... whole blocks."""
    hashes: list[int] = []
    for end in range(BLOCK, len(tokens) + 1, BLOCK):
        hashes.append(hash((*hashes[-1:], *tokens[end - BLOCK : end])))
    return hashes
