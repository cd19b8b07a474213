"""Parts handed out and brought home, on one rank that sends to itself."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from nemotron_steps.engine.policy.distributed.partial_all_to_all import Exchange, collect, spread
from nemotron_steps.models.megatron_core import ensure_process_group


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
