"""What one rank of a placed policy does for all of them."""

from types import SimpleNamespace

import pytest
import torch

from nemotron_steps.engine.placement.policy_group import PolicyWorker


@pytest.mark.parametrize(("rank", "device"), [(0, "cpu"), (1, "meta")])
def test_every_rank_walks_through_the_weights_and_only_the_first_copies_them(rank, device):
    walked = []

    def weights():
        for name in "ab":
            yield name, torch.ones(2, device=device)  # what is on `meta` cannot be copied
            walked.append(name)

    worker = PolicyWorker()
    worker._rank, worker._policy = rank, SimpleNamespace(weights=weights)
    read = worker.read_weights()
    assert walked == ["a", "b"] and (read is None) is (rank == 1)
