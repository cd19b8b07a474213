"""Weights between processes: what arrives is what was sent, bucket by bucket, every transport that this machine has."""

import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nemotron_steps.engine.weight_sync.transfer import (
    StreamReceiver,
    StreamSender,
    WeightPlan,
    choose_transports,
    receivers_of,
)
from nemotron_steps.engine.workers.workers import Worker, bind_port, join_store, serve_store
from tests.engine.weight_sync.transfers import transfer


def weights(seed: int, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"a": (7, 5), "b": (300,), "c": (40, 40), "d": (1,), "e": (3, 2, 2)}
    found = [(name, torch.randn(shape, generator=generator).to(dtype)) for name, shape in shapes.items()]
    return [*found, ("bias", torch.randn(9, generator=generator).bfloat16())]


def same(received, sent):
    received = list(received)
    assert [name for name, _ in received] == [name for name, _ in sent]
    return all(a.dtype is b.dtype and torch.equal(a, b) for (_, a), (_, b) in zip(received, sent, strict=True))


@pytest.mark.parametrize(("bucket_bytes", "buckets"), [(1, 6), (1536, 3), (2000, 3), (10**9, 1)])
def test_a_bucket_is_filled_to_its_last_byte(bucket_bytes, buckets):
    assert len(WeightPlan.of(weights(0), bucket_bytes).buckets) == buckets


@pytest.mark.parametrize("receivers", [1, 2])
def test_a_broadcast_stream_carries_every_bucket_to_every_receiver(receivers):
    served, port = serve_store("127.0.0.1")
    names = [f"generator {number}" for number in range(receivers)]
    device = torch.device("cpu")
    plan = WeightPlan.of(weights(0), 2000)
    sender = StreamSender(plan, served, "rank 0", ipc=[], broadcast=names, device=device)
    received = {name: [] for name in names}

    def receive(number, name):
        offer = replace(sender.offer(), address=("127.0.0.1", port), name=name, place=(1 + number, 1 + receivers))
        stream = StreamReceiver.of(offer)
        for _ in range(3):
            received[name].append([(weight, tensor.clone()) for weight, tensor in stream.weights()])

    threads = [threading.Thread(target=receive, args=item) for item in enumerate(names)]
    for thread in threads:
        thread.start()
    for seed in range(3):
        sender.send(iter(weights(seed)))
    for thread in threads:
        thread.join(30)
    for name in names:
        assert [same(got, weights(seed)) for seed, got in enumerate(received[name])] == [True] * 3


@pytest.mark.ray
def test_a_placed_policy_sends_its_weights_to_two_receivers_bit_for_bit(cluster, tmp_path):
    found = transfer(tmp_path, gpus=0, layers=1, hidden=128, receivers=2)
    assert [one["transports"] for one in found] == [[("gloo", 0)] * 2]
    assert all(one["equal"] and one["bytes"] > 2 * 8e6 for one in found)


def worker(name, node, *devices):
    return Worker(name, None, node=node, devices=devices)


def transports(ranks, generators, processes=1):
    return choose_transports(ranks, [device for one in generators for _, device in receivers_of(one, processes)])


def test_the_way_follows_the_device():
    ranks = [worker("r0", "n0"), worker("r1", "n0")]
    assert transports(ranks, [worker("g0", "n1")], processes=2) == [("gloo", 0)] * 2
    ranks = [worker("r0", "n0", "GPU-a"), worker("r1", "n0", "GPU-b")]
    generators = [worker("g0", "n0", "GPU-b"), worker("g1", "n0", "GPU-c"), worker("g2", "n0", "GPU-a")]
    assert transports(ranks, generators) == [("cuda_ipc", 1), ("nccl", 0), ("cuda_ipc", 0)]
    ranks = [worker("r0", "n0", "GPU-a"), worker("r1", "n0", "GPU-b"), worker("r2", "n0", "GPU-b")]
    assert transports(ranks, generators) == [("cuda_ipc", 1), ("nccl", 0), ("cuda_ipc", 0)]


def test_a_bound_port_cannot_be_taken_and_a_store_listens_where_it_was_told():
    first = bind_port("127.0.0.1")
    with pytest.raises(OSError):
        type(first)(first.family, first.type).bind(first.getsockname())
    store, port = serve_store("127.0.0.1")
    store.set("key", "value")
    assert join_store("127.0.0.1", port).get("key") == b"value"
    tables = [Path(f"/proc/net/{name}").read_text() for name in ("tcp", "tcp6")]
    addresses = [line.split()[1] for table in tables for line in table.splitlines()[1:]]
    ours = [address.split(":")[0] for address in addresses if address.endswith(f":{port:04X}")]
    assert "00000000" not in ours and "0" * 32 not in ours  # not on every interface
    first.close()
