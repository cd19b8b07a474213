"""Streams keep step: through one GPU's memory as CUDA would share it, and where a receiver does not answer."""

import threading
import time
from dataclasses import replace

import pytest
import torch
from torch.distributed import HashStore

from nemotron_steps.engine.weight_sync import transfer
from nemotron_steps.engine.weight_sync.transfer import StreamReceiver, StreamSender, WeightPlan
from tests.engine.weight_sync.test_weight_sync import same, weights

CPU = torch.device("cpu")
NAMES = ["g0", "g1"]


class Late:
    """Memory of another process that is read a while after it is asked for."""

    def __init__(self, tensor, seconds):
        self._tensor, self._seconds = tensor, seconds

    def __getitem__(self, part):
        time.sleep(self._seconds)
        return self._tensor[part]


@pytest.fixture
def shared(monkeypatch):
    """Tensors handed over as they are, with the number of their device where CUDA has it; how late they are read."""
    late = {"receivers": 0.0}

    def rebuild(*handle):
        assert handle[6] == 0, "the receiver's own number"
        return Late(handle[0], late["receivers"])

    reductions = "torch.multiprocessing.reductions"
    monkeypatch.setattr(f"{reductions}.reduce_tensor", lambda tensor: (None, (tensor, 1, 2, 3, 4, 5, "sender's", 7)))
    monkeypatch.setattr(f"{reductions}.rebuild_cuda_tensor", rebuild)
    monkeypatch.setattr(transfer, "FIRST_SECONDS", 20.0)
    monkeypatch.setattr(transfer, "LATER_SECONDS", 0.001)  # of GPUs alone
    return late


def slowly(tensors, seconds):
    for each in tensors:
        time.sleep(seconds)
        yield each


def receiving(sender, store, name, transfers, got):
    stream = StreamReceiver(replace(sender.offer(), name=name), store, torch.device("cpu", 0))

    def receive():
        for _ in range(transfers):
            got.append(list(stream.weights()))  # kept as they were given until all are there, as vLLM does

    thread = threading.Thread(target=receive, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("late", ["sender", "receivers"])
def test_a_staging_buffer_is_read_when_it_is_filled_and_filled_when_all_have_read_it(late, shared):
    shared[late] = 0.005
    store, plan = HashStore(), WeightPlan.of(weights(0), 2000)
    assert len(plan.buckets) == 3
    sender = StreamSender(plan, store, "rank 0", ipc=NAMES, broadcast=[], device=CPU)
    received = {name: [] for name in NAMES}
    threads = [receiving(sender, store, name, 2, received[name]) for name in NAMES]
    for seed in range(2):
        sender.send(slowly(weights(seed), shared.get("sender", 0.0)))
    for thread in threads:
        thread.join(20)
    for name in NAMES:
        assert [same(got, weights(seed)) for seed, got in enumerate(received[name])] == [True] * 2
    assert store.num_keys() == 0  # a run has thousands of transfers
