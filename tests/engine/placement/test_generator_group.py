"""The thread that decodes inside a generation actor: which commands it takes, and when."""

import random
import sys
import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.distributed import HashStore

from nemotron_steps.engine.placement import generator_group
from nemotron_steps.engine.placement.generator_group import (
    AFFINITY_MARGIN,
    GenerationWorker,
    RayGenerator,
)
from nemotron_steps.engine.types import Completion, FinishReason, GenerationRequest, SamplingParams
from nemotron_steps.engine.weight_sync.transfer import Offer, StreamReceiver, WeightPlan


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

    def build(self: GenerationWorker, weights: Any) -> None:
        generator.told.append(f"built of {[name for name, _ in weights]}")
        self._generator = cast(Any, generator)

    monkeypatch.setattr(GenerationWorker, "_build", build)
    made = GenerationWorker(cast(Any, None))
    plan = WeightPlan.of([("w", torch.zeros(2, 3))])
    made._receiving = StreamReceiver(Offer(plan, "policy", None, place=(1, 2)), HashStore(), torch.device("cpu"))
    monkeypatch.setattr(made._receiving, "weights", lambda: [("w", torch.zeros(2, 3))])
    assert made.update_weights(3) == 2 * 3 * 4
    return made, generator


def test_what_ends_the_decoding_is_told_to_whoever_collects_or_commands(worker: tuple[GenerationWorker, Noted]) -> None:
    made, _ = worker
    made.submit(requests("bad"))
    with pytest.raises(ValueError, match="too long"):
        made.collect(30.0)
    with pytest.raises(ValueError, match="too long"):
        made.update_weights(5)


ENGINES = 8
SYSTEM = list(range(1000, 1200))


@pytest.fixture
def generator(monkeypatch):
    monkeypatch.setattr(generator_group, "start_workers", lambda kind, names, *_: list(names))
    settings = SimpleNamespace(max_total_length=2**20, config=SimpleNamespace(devices_per_generator=1))
    return RayGenerator(settings, [{}] * ENGINES)


def submit(generator, name, tokens, n=1):
    """The engine's number."""
    generator.submit(GenerationRequest(name, tokens, SamplingParams(64), n))
    return generator._engines.index(generator._open[name].engine)


def finish(generator, name, tokens, index=0):
    assert generator._note(Completion(name, index, tokens, [], FinishReason.STOP, []))


def pending(generator):
    return [engine.pending for engine in generator._engines]


def test_nearly_every_later_turn_reaches_its_engine_and_load_stays_even(generator):
    """256 agents, whose rollouts of one prompt begin alike; at any time about half of them wait for their tools."""
    draw = random.Random(0)
    chats = {number: [*SYSTEM, *([number // 16] * 70)] for number in range(256)}
    served, running, waiting, later, reached = {}, [], list(chats), 0, 0
    for _ in range(8000):
        if waiting and (not running or len(running) < 128 or draw.random() < 0.5):
            agent = waiting.pop(draw.randrange(len(waiting)))
            before = pending(generator)
            engine = submit(generator, str(agent), chats[agent])
            assert before[engine] + 1 - min(before) <= AFFINITY_MARGIN
            if agent in served:
                later, reached = later + 1, reached + (engine == served[agent])
            served[agent] = engine
            running.append(agent)
        else:
            agent = running.pop(draw.randrange(len(running)))
            answer = [draw.randrange(1000) for _ in range(draw.randrange(8, 40))]
            finish(generator, str(agent), answer)
            chats[agent] = [*chats[agent], *answer, *([7] * draw.randrange(3, 30))]
            waiting.append(agent)
    assert later > 3000 and reached / later >= 0.95


def test_a_group_stays_whole_and_each_of_its_samples_goes_on_where_it_was(generator):
    engine = submit(generator, "group", SYSTEM, n=4)
    assert pending(generator)[engine] == 4
    for index in range(4):
        finish(generator, "group", [index], index)
    submit(generator, "other", [1, 2, 3])
    assert {submit(generator, f"turn {i}", [*SYSTEM, i, 99]) for i in range(4)} == {engine}


def test_a_request_is_cancelled_where_it_is_and_one_that_has_not_left_yet_is_only_dropped(generator, monkeypatch):
    told = []
    engine = generator._engines[0]
    engine.worker = SimpleNamespace(
        call=lambda *asked: told.append(asked), beside=lambda *asked: told.append(asked) or "collecting"
    )
    ray = SimpleNamespace(wait=lambda references, **_: ([], references))
    monkeypatch.setitem(sys.modules, "ray", ray)
    first = GenerationRequest("sent", [1, 2], SamplingParams(4), 1)
    generator.submit(first)
    for _ in range(2):
        assert generator.step() == []
    assert told == [("submit", [first]), ("collect", generator_group.COLLECT_SECONDS)]
    engine.pending = 0  # so that the next goes there as well
    submit(generator, "waiting", [1, 2])
    generator.cancel("waiting")
    generator.cancel("sent")
    assert told[2:] == [("cancel", "sent")] and engine.outbox == []
