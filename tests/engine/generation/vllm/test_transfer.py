"""What of a policy with adapters travels to an engine's workers, and when. No engine, no vLLM."""

from __future__ import annotations

import pytest
import torch

from nemotron_steps.engine.generation.vllm.transfer import WorkersTransfer
from nemotron_steps.engine.policy.lora import AdaptedWeights


def adapted(source: object) -> AdaptedWeights:
    def weights(*names: str):
        return lambda: iter([(name, torch.zeros(1)) for name in names])

    return AdaptedWeights(
        source,
        whole=weights("whole"),
        changed=weights("changed"),
        frozen=weights("frozen"),
        adapters=weights("A", "B"),
        whole_modules=True,
    )


def test_frozen_weights_travel_once_for_each_policy_and_adapters_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    transfer = WorkersTransfer(None, 1, own_process=True)
    done: list[tuple[str, str]] = []

    def names(weights) -> str:
        return "".join(name for name, _ in weights)

    def opened(weights) -> str:
        done.append(("open", names(weights)))
        return done[-1][1]

    def sent(sender: str, weights) -> int:
        done.append((f"send by {sender}", names(weights)))
        return len(done[-1][1])

    monkeypatch.setattr(transfer, "_open", opened)
    monkeypatch.setattr(transfer, "_send", sent)
    policy, other = object(), object()
    assert [transfer.load(adapted(source)) for source in (policy, policy, other)] == [8, 2, 8]
    adapters, frozen = ("send by AB", "AB"), ("send by frozen", "frozen")
    # Both ways are open before the first is used: workers keep what adapters are added to.
    assert done == [("open", "AB"), ("open", "frozen"), frozen, adapters, adapters, frozen, adapters]
