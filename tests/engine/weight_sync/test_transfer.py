"""Plans and offers: what travels where, without any worker."""

import pytest

from nemotron_steps.engine.weight_sync import transfer as module
from nemotron_steps.engine.weight_sync.transfer import Offer, WeightPlan, WeightTransfer

PLAN = WeightPlan(())


class Noted:
    """A worker that notes its calls and answers them when they are settled."""

    def __init__(self, name, log, answers, *, node="n0", devices=()):
        self.name, self.node, self.devices = name, node, devices
        self.device = devices[0] if devices else None
        self._log, self._answers = log, answers

    def call(self, method, *arguments):
        self._log.append((self.name, method, *arguments))
        return (len(self._log), self._answers.get(method, 0))


@pytest.fixture
def log(monkeypatch):
    log = []

    def settle(calls):
        log.append("settled")
        for _, answer in calls:
            if isinstance(answer, Exception):
                raise answer
        return [answer for _, answer in calls]

    monkeypatch.setattr(module, "settle", settle)
    return log


def test_streams_are_sent_while_they_are_taken_and_each_process_has_its_place(log):
    ranks = [
        Noted(f"r{n}", log, {"open_sender": Offer(PLAN, f"r{n}", None), "send_weights": 99}, devices=(f"GPU-{n}",))
        for n in (0, 1)
    ]
    answers = {"update_weights": 5}
    generators = [
        Noted("g0", log, answers, devices=("GPU-1", "GPU-8")),
        Noted("g1", log, answers, devices=("GPU-9", "GPU-0")),
    ]
    opened = WeightTransfer(ranks, generators, ("host", 1), processes=2)
    assert opened.transports == [("cuda_ipc", 1), ("nccl", 0), ("nccl", 0), ("cuda_ipc", 0)]
    channel = log[0][2]
    assert log[:2] == [
        ("r0", "open_sender", channel, ["g1/1"], ["g0/1", "g1/0"]),
        ("r1", "open_sender", channel, ["g0/0"], []),
    ]

    def offer(number, name, place):
        return Offer(PLAN, f"r{number}", None, ("host", 1), name, place)

    assert log[3:5] == [
        ("g0", "open_receiver", channel, [offer(1, "g0/0", None), offer(0, "g0/1", (1, 3))]),
        ("g1", "open_receiver", channel, [offer(0, "g1/0", (2, 3)), offer(0, "g1/1", None)]),
    ]
    del log[:]
    assert opened.update(3) == 10  # what ranks answer is no bytes received
    assert log.count("settled") == 1 and log[-1] == "settled"
