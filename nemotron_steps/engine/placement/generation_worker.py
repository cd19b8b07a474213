"""One generator inside an actor. It decodes in a thread of its own, without being asked to, and takes commands
(requests, cancellations, weights) between two steps."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemotron_steps.config.schema.grpo import AsyncGrpoConfig
from nemotron_steps.config.schema.policy import GenerationConfig
from nemotron_steps.engine.types import Completion, GenerationRequest, Generator
from nemotron_steps.engine.weight_sync.transport_handle import ChannelHandles, TransportHandle
from nemotron_steps.engine.workers.workers import WorkerProcess

if TYPE_CHECKING:
    from nemotron_steps.engine.generation.vllm.generator import VllmGenerator
    from nemotron_steps.engine.weight_sync.endpoints import FrozenWeights, ReceivingEndpoint


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
    """See the module docstring. Ray runs `collect` beside the other methods; those run one at a time, in order."""

    def __init__(self, settings: GeneratorSettings) -> None:
        self._settings = settings
        self._receiving: dict[str, ReceivingEndpoint | ChannelHandles] = {}
        self._frozen: FrozenWeights | None = None
        self._generator: Generator | None = None
        self._commands: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any] | None]] = queue.SimpleQueue()
        self._arrived = threading.Condition()
        self._finished: list[Completion] = []
        self._error: Exception | None = None
        threading.Thread(target=self._run, name="decode", daemon=True).start()

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests. A refused one fails the next `collect`."""

        def queue_all() -> None:
            for request in requests:
                self._built().submit(request)

        self._commands.put((queue_all, None))

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

    def open_receiver(self, channel: str, offers: Sequence[TransportHandle]) -> None:
        """Get ready to receive: here, or in each of the generator's own processes."""
        self._between_steps(lambda: self._open(channel, tuple(offers)))

    def _open(self, channel: str, offers: tuple[TransportHandle, ...]) -> None:
        from nemotron_steps.engine.generation.vllm.engine import runs_elsewhere
        from nemotron_steps.engine.weight_sync.endpoints import FrozenWeights, ReceivingEndpoint

        self._frozen = self._frozen or FrozenWeights()
        settings = self._settings.config
        if settings.backend != "vllm" or not runs_elsewhere(settings.vllm_cfg):
            (offer,) = offers
            self._receiving[channel] = ReceivingEndpoint(offer, self._frozen)
            return
        # Its own processes take up their offers now: what is offered under a name loses it when all have.
        offered = self._receiving[channel] = ChannelHandles(channel, offers)
        if self._generator is None:
            self._generator = self._build(offered)
        else:
            self._elsewhere().open_channel(offered)

    def load(self) -> None:
        """Build the generator with the weights of its folder."""

        def build() -> None:
            self._generator = self._build(None)

        self._between_steps(build)

    def update_weights(self, channel: str, version: int) -> int:
        """Load what the policy sends; the first time, build the generator with it. Returns the bytes received."""
        return int(self._between_steps(lambda: self._load(channel, version)))

    def _load(self, channel: str, version: int) -> int:
        from nemotron_steps.engine.policy.lora import ChangedWeights

        receiving = self._receiving[channel]
        if isinstance(receiving, ChannelHandles):
            return self._elsewhere().update_weights(receiving, version).bytes
        weights = receiving.weights()
        if self._generator is None:
            self._generator = self._build(weights)
            self._generator.weight_version = version
        else:
            self._generator.update_weights(ChangedWeights(weights) if receiving.is_adapter else weights, version)
        return receiving.bytes

    def _build(self, weights: Any) -> Generator:
        from nemotron_steps.engine.setup.backends import build_generator
        from nemotron_steps.models.chat import ChatFormat

        given = dict(vars(self._settings))
        folder, config = given.pop("hf_folder"), given.pop("config")
        return build_generator(folder, config, ChatFormat.from_folder(folder), weights=weights, **given)

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
        while True:
            try:
                return done.result(timeout=1.0)
            except TimeoutError:
                if done.done():  # the command raised it, or was done just now
                    return done.result()
                if self._error is not None:
                    raise self._error from None

    def _run(self) -> None:
        try:
            while True:
                self._obey(wait=self._generator is None or self._generator.pending() == 0)
                if self._generator is None or self._generator.pending() == 0:
                    continue
                finished = self._generator.step()
                if finished:
                    with self._arrived:
                        self._finished += finished
                        self._arrived.notify_all()
        except Exception as error:
            with self._arrived:
                self._error = error
                self._arrived.notify_all()

    def _obey(self, *, wait: bool) -> None:
        """Carry out every waiting command; with `wait`, wait for the first."""
        while True:
            try:
                command, done = self._commands.get(block=wait)
            except queue.Empty:
                return
            wait = False
            if done is None:
                command()
                continue
            try:
                done.set_result(command())
            except Exception as error:  # belongs to whoever gave the command
                done.set_exception(error)
