"""The two ends of a transfer in one process: who sends, and that every rank reads the policy's weights to the end."""

from __future__ import annotations

import os

import pytest
import torch

from nemotron_steps.engine.weight_sync.adapted import FrozenWeights
from nemotron_steps.engine.weight_sync.endpoints import ReceivingEndpoint, SendingEndpoint
from nemotron_steps.engine.weight_sync.transport_handle import SHARED_MEMORY, TransportHandle

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
