"""Which heads go where under context parallelism, and parts that are handed out and brought home."""

import pytest
import torch
import torch.distributed as dist

from nemotron_steps.engine.policy.distributed.context_parallel import Exchange, collect, head_shares, spread
from nemotron_steps.models.megatron_core import ensure_process_group


def heads_of(ranges):
    return [head for first, after in ranges for head in range(first, after)]


@pytest.mark.parametrize(
    ("heads", "shared", "ranks", "parts"),
    [
        (16, 1, 8, 8),
        (4, 1, 8, 4),
        (8, 2, 4, 4),
        (6, 2, 4, 2),
        (6, 3, 2, 2),
        (3, 3, 2, 1),
        (12, 4, 8, 4),
        (5, 5, 5, None),
    ],
)
def test_each_head_of_each_token_attends_once_with_its_key(heads, shared, ranks, parts):
    shares = [head_shares(heads, shared, ranks, rank) for rank in range(ranks)]
    if parts is None:
        assert shares == [None] * ranks  # as many key-value heads: tokens for heads
        return
    seen = set()
    for rank, share in enumerate(shares):
        assert len(share.of) == parts and rank in share.of
        queries = {tuple(heads_of(shares[source].queries.sent[rank])) for source in share.of}
        (own,) = queries
        assert share.queries.received == tuple(len(own) if source in share.of else 0 for source in range(ranks))
        (keys,) = {tuple(heads_of(other.keys.sent[rank])) for other in shares}
        assert share.keys.received == (len(keys),) * ranks
        for place, head in enumerate(own):  # as grouped-query attention takes them
            assert keys[place * len(keys) // len(own)] == head * shared // heads
            seen |= {(head, source) for source in share.of}
    assert len(seen) == heads * ranks and sum(len(share.of) for share in shares) * (heads // parts) == heads * ranks


def test_teams_of_ranks_have_the_same_work_of_one_long_sequence():
    teams = {head_shares(4, 1, 8, rank).of for rank in range(8)}
    assert teams == {(0, 3, 4, 7), (1, 2, 5, 6)}
    assert head_shares(4, 1, 8, 0).ranges(10) == ((0, 10), (30, 40), (40, 50), (70, 80))


@pytest.fixture(autouse=True)
def group():
    ensure_process_group()
    return dist.group.WORLD


@pytest.mark.parametrize("along", [0, 1])
def test_what_comes_home_is_what_was_handed_out_and_so_is_the_gradient(along, group):
    exchange = Exchange(5, (((3, 5), (0, 2)),), (4,), along)
    states = torch.randn(3, 5, 2, requires_grad=True)
    parts = spread(states, exchange, group)
    assert torch.equal(parts, states[:, [3, 4, 0, 1]])
    home = collect(parts, exchange, group)
    expected = states.detach().clone()
    expected[:, 2] = 0
    assert torch.equal(home, expected)
    upstream = torch.randn_like(home)
    (gradient,) = torch.autograd.grad(home, states, upstream)
    upstream[:, 2] = 0
    assert torch.equal(gradient, upstream)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_several_return_of_one_part_is_added_up_before_it_is_rounded(dtype, group):
    exchange = Exchange(2, (((0, 2), (1, 2), (0, 2), (1, 2)),), (6,), 1)
    parts = torch.tensor([[1.0, 256.0, 1.0, 3.0, 1.0, 1.0]], dtype=dtype)
    found = collect(parts, exchange, group)
    assert torch.equal(found, torch.tensor([[4.0, 259.0]]).to(dtype))  # one by one, bfloat16 would stay at 256
