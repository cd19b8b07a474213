"""The two ends of a transfer in one process: who sends, and that every rank reads the policy's weights to the end."""

from __future__ import annotations

import os

import pytest
import torch
from torch.distributed import HashStore

from nemotron_steps.engine.weight_sync.adapted import FrozenWeights
from nemotron_steps.engine.weight_sync.endpoints import ReceivingEndpoint, SendingEndpoint
from nemotron_steps.engine.weight_sync.plan import WeightPlan
from nemotron_steps.engine.weight_sync.transport_handle import OBJECTS, SHARED_MEMORY, STREAM, TransportHandle
from nemotron_steps.errors import EngineError
from nemotron_steps.models.adapters import peft_name

GIVEN = [("a", torch.arange(3.0)), ("b", torch.ones(64)), ("c", torch.arange(65, dtype=torch.bfloat16))]


def sender(rank, read):
    """A rank's end, which adds to `read` what is read of its weights."""

    def weights():
        for name, tensor in GIVEN:
            read.append(name)
            yield name, tensor

    return SendingEndpoint("channel", weights, rank, lambda: pytest.fail("no store is needed"))


def test_rank_0_alone_makes_a_segment_and_all_ranks_read_their_weights():
    reads = [[], []]
    first, second = (sender(rank, read) for rank, read in enumerate(reads))
    plan, path = first.open(SHARED_MEMORY)
    assert second.open(SHARED_MEMORY) is None
    receiving = ReceivingEndpoint(TransportHandle(SHARED_MEMORY, (plan, path)), FrozenWeights())
    for end in (first, second):
        end.hide_segment()
    assert not os.path.exists(path)
    for read in reads:
        del read[:]
    assert [end.send() for end in (first, second)] == [None, None]
    assert reads == [[name for name, _ in GIVEN]] * 2
    received = list(receiving.weights(None))
    assert all(a == b and torch.equal(x, y) for (a, x), (b, y) in zip(received, GIVEN, strict=True))
    assert receiving.bytes == sum(tensor.nbytes for _, tensor in GIVEN) and not receiving.is_adapter


@pytest.mark.parametrize("transport", [STREAM, OBJECTS])
def test_a_rank_that_sends_nothing_reads_its_weights_all_the_same(transport):
    end = sender(1, read := [])
    opened = end.open(transport)
    assert opened is None if transport == STREAM else isinstance(opened, WeightPlan)
    del read[:]
    assert end.send() is None and read == [name for name, _ in GIVEN]


@pytest.mark.parametrize(("ipc", "broadcast"), [(["g0"], []), ([], ["g1"])])
def test_a_rank_with_receivers_of_one_kind_alone_offers_them_its_stream(ipc, broadcast, monkeypatch):
    monkeypatch.setattr("torch.multiprocessing.reductions.reduce_tensor", lambda tensor: (None, "handle"))
    end = SendingEndpoint("channel", lambda: iter(GIVEN), 1, HashStore)
    offer = end.open(STREAM, ipc, broadcast)
    assert (offer.sender, offer.staging) == ("channel/rank 1", "handle" if ipc else None)
    assert offer.plan == WeightPlan.of(GIVEN)


def test_weights_whose_transport_is_not_open_are_refused():
    receiving = ReceivingEndpoint(TransportHandle(OBJECTS, WeightPlan.of(GIVEN)), FrozenWeights())
    with pytest.raises(EngineError, match="before their transport was opened"):
        receiving.weights(None)


def test_a_receiver_of_adapters_knows_that_it_is_one():
    halves = [(peft_name("model.norm.weight", letter), torch.ones(1, 1)) for letter in "AB"]
    receiving = ReceivingEndpoint(TransportHandle(OBJECTS, WeightPlan.of(halves)), FrozenWeights())
    assert receiving.is_adapter
