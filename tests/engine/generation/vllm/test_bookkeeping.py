"""What is kept beside a vLLM engine: versions, sleep, and which weights travel. No engine, no vLLM."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nemotron_steps.engine.generation.embedded.sampling import versions_of
from nemotron_steps.engine.generation.vllm.generator import VllmGenerator, _Sequence
from nemotron_steps.engine.generation.vllm.transfer import (
    _LocalSender,
    lost_worker,
)

WEIGHTS = [("a", torch.zeros(3)), ("b", torch.zeros(2, 2, dtype=torch.bfloat16))]


class Engine:
    """Notes what it is asked for."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def sleep(self, level: int) -> None:
        self.told.append(f"sleep {level}")

    def wake_up(self, tags: list[str]) -> None:
        self.told.append(f"wake {tags}")

    def reset_prefix_cache(self, reset_running_requests: bool) -> None:
        self.told.append(f"reset {reset_running_requests}")

    def abort_request(self, keys: list[str]) -> None:
        self.told.append(f"abort {keys}")

    @property
    def output_processor(self) -> Any:
        return SimpleNamespace(request_states={})


def made(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> tuple[VllmGenerator, Engine, list[Any]]:
    """A generator over an engine that only notes; and what weights it was handed."""
    generator, engine, handed = object.__new__(VllmGenerator), Engine(), []
    state: dict[str, Any] = {
        "weight_version": 3, "_returned_tokens": 0, "_finished": [], "_asleep": set(),
        "_recompute": False, "_in_flight": True, "_max_total_length": 99, "_sequences": {}, "_mixtures": (),
        "_engine": engine, "_own_process": False, "_sleeps": False, "_to_workers": None,
    }  # fmt: skip
    vars(generator).update(state | changes)

    def noted(engine: Any, weights: Any) -> int:
        handed.append((type(weights).__name__, [name for name, _ in weights]))
        return 7

    monkeypatch.setattr("nemotron_steps.engine.generation.vllm.generator.hand_over", noted)
    return generator, engine, handed


@pytest.mark.parametrize(
    ("changes", "tokens", "versions"),
    [
        ([(0, 1), (2, 2), (9, 3)], 4, [1, 1, 2, 2]),
        ([(0, 1), (4, 2), (5, 3)], 4, [1] * 4),
        ([(0, 1), (0, 2), (1, 3)], 2, [2, 3]),
    ],
)
def test_each_token_is_of_the_version_that_held_when_it_was_sampled(
    changes: list[tuple[int, int]], tokens: int, versions: list[int]
) -> None:
    assert versions_of(changes, tokens) == versions


def test_it_sleeps_when_nothing_is_asked_for_and_wakes_for_weights_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    generator, engine, _ = made(monkeypatch)
    generator.finish_generation()  # it shares no device
    generator._sleeps = True
    generator._sequences["a#0"] = _Sequence("a", 0, [(0, generator.weight_version)])
    generator.finish_generation()
    assert engine.told == []
    generator.cancel("a")
    for _ in range(2):
        generator.finish_generation()
    assert engine.told == ["abort ['a#0']", "sleep 2"] and generator._asleep == {"weights", "kv_cache"}
    generator.update_weights(WEIGHTS, 4)
    assert engine.told[2:] == ["wake ['weights']", "reset False"] and generator._asleep == {"kv_cache"}


def test_what_stops_a_sender_is_raised_and_not_what_that_causes() -> None:
    def send(weights: Any) -> None:
        raise LookupError("the sender")

    sender: Any = object.__new__(_LocalSender)
    sender._stream = SimpleNamespace(send=send)
    with pytest.raises(LookupError, match="sender"), sender.sending(iter([])):
        pass
    with pytest.raises(LookupError, match="sender"), sender.sending(iter([])):
        import time

        time.sleep(0.05)
        raise ValueError("the receiver")


@pytest.mark.parametrize("codes", [(None, None), (-15, 1), (None, -15)])
def test_the_worker_that_died_by_itself_is_named(codes: tuple[int | None, ...]) -> None:
    workers = [SimpleNamespace(proc=SimpleNamespace(exitcode=code, pid=40)) for code in codes]
    lost = lost_worker(SimpleNamespace(model_executor=SimpleNamespace(workers=workers)), RuntimeError("x"))
    assert (lost and lost.found) == (codes[1] and f"it ended with exit code {codes[1]}")
