"""The thread that decodes inside a generation actor: which commands it takes, and when."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from nemotron_steps.engine.placement.generation_worker import GenerationWorker
from nemotron_steps.engine.types import Completion, GenerationRequest


class Noted:
    """A generator that writes down what it is told; a request named `slow` holds it up."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.free = threading.Event()
        self.waiting: list[str] = []
        self.sampled_tokens = self.weight_version = 0

    def submit(self, request: Any) -> None:
        self.told.append(request.request_id)
        if request.request_id == "slow":
            self.free.wait(30)
        if request.request_id == "bad":
            raise ValueError("too long")
        self.waiting.append(request.request_id)

    def cancel(self, request_id: str) -> None:
        self.told.append(f"cancel {request_id}")
        self.waiting.remove(request_id)

    def update_weights(self, weights: Any, version: int) -> None:
        self.told.append(f"version {version} of {[name for name, _ in weights]}")
        self.weight_version = version

    def pending(self) -> int:
        return len(self.waiting)

    def step(self) -> list[Completion]:
        self.sampled_tokens += 1
        return [cast(Completion, self.waiting.pop(0))]


def requests(*names: str) -> list[GenerationRequest]:
    return [cast(GenerationRequest, SimpleNamespace(request_id=name)) for name in names]


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> tuple[GenerationWorker, Noted]:
    """A worker that has been sent its first weights, version 3."""
    generator = Noted()

    def build(self: GenerationWorker, weights: Any) -> Noted:
        generator.told.append(f"built of {[name for name, _ in weights]}")
        return generator

    monkeypatch.setattr(GenerationWorker, "_build", build)
    made = GenerationWorker(cast(Any, None))
    sent = SimpleNamespace(weights=lambda references: [("w", torch.zeros(2, 3))], bytes=24, is_adapter=False)
    made._receiving["policy"] = cast(Any, sent)
    assert made.update_weights("policy", 3) == 2 * 3 * 4
    return made, generator


def collected(worker: GenerationWorker, count: int) -> list[Any]:
    found: list[Any] = []
    while len(found) < count:
        found += worker.collect(30.0)[1]
    return found


def test_the_first_weights_build_the_generator_and_later_ones_are_loaded(
    worker: tuple[GenerationWorker, Noted],
) -> None:
    made, generator = worker
    assert generator.weight_version == 3
    made.update_weights("policy", 4)
    assert generator.told == ["built of ['w']", "version 4 of ['w']"] and generator.weight_version == 4


def test_commands_are_carried_out_in_the_order_they_were_given(worker: tuple[GenerationWorker, Noted]) -> None:
    made, generator = worker
    for command in (("slow",), ("a", "b")):
        made.submit(requests(*command))
    made.cancel("a")
    made.submit(requests("c"))
    generator.free.set()
    assert collected(made, 3) == ["slow", "b", "c"]
    assert generator.told[1:] == ["slow", "a", "b", "cancel a", "c"]
    assert made.collect(0.0) == (3, [])


def test_what_ends_the_decoding_is_told_to_whoever_collects_or_commands(worker: tuple[GenerationWorker, Noted]) -> None:
    made, _ = worker
    made.submit(requests("bad"))
    with pytest.raises(ValueError, match="too long"):
        made.collect(30.0)
    with pytest.raises(ValueError, match="too long"):
        made.update_weights("policy", 5)


def test_a_command_that_fails_is_its_givers_error_and_decoding_goes_on(worker: tuple[GenerationWorker, Noted]) -> None:
    made, _ = worker
    with pytest.raises(KeyError):
        made.update_weights("nobody", 5)
    made.submit(requests("a"))
    assert collected(made, 1) == ["a"]
