"""Random generators in training checkpoints: every rank's own, and CUDA's by the way of torch's."""

from __future__ import annotations

import base64
import copy
import json

import pytest
import torch
import torch.distributed as dist

from nemotron_steps.engine.policy import checkpoint as random_state
from nemotron_steps.engine.policy.checkpoint import random_states, restore_random_states, saved_random_states
from nemotron_steps.models.megatron_core import ensure_process_group


@pytest.fixture
def second(monkeypatch):
    """A generator in the place of CUDA's."""
    ensure_process_group()
    generator = torch.Generator().manual_seed(7)
    of_torch = random_state._generators()[:1]
    monkeypatch.setattr(random_state, "_generators", lambda: [*of_torch, (generator.get_state, generator.set_state)])
    return generator


def drawn(generator):
    return torch.rand(3).tolist(), torch.rand(3, generator=generator).tolist()


def test_both_generators_go_on_where_they_were(second):
    saved = json.loads(json.dumps(random_states((1, 1, 1))))
    expected = drawn(second)
    assert drawn(second) != expected
    restore_random_states(saved, (1, 1, 1))
    assert drawn(second) == expected


def test_a_generator_that_was_not_saved_stays_as_it_is(second, monkeypatch):
    both = random_state._generators()
    monkeypatch.setattr(random_state, "_generators", lambda: both[:1])
    saved = random_states(())
    before = second.get_state()
    monkeypatch.setattr(random_state, "_generators", lambda: both)
    restore_random_states(saved, ())
    assert torch.equal(second.get_state(), before)


def test_each_rank_has_its_own_in_the_same_layout_and_rank_0s_in_another(second, monkeypatch):
    states = []
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        states.append(random_states((1,)))
    saved = copy.deepcopy(states[0])
    saved["layout"], saved["of_rank"] = [3, 1], [0, 1, 0]
    saved["states"] = [states[0]["states"][0], states[1]["states"][0]]
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    for layout, seeds in (((1,), (1, 2, 1)), ((2,), (1, 1, 1))):
        for rank, seed in enumerate(seeds):
            monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
            restore_random_states(saved, layout)
            found = torch.rand(2)
            assert torch.equal(found, torch.rand(2, generator=torch.Generator().manual_seed(seed)))


@pytest.mark.parametrize("written", [lambda s: base64.b64encode(s.numpy().tobytes()).decode(), lambda s: s.tolist()])
def test_the_state_of_an_earlier_versions_checkpoint_is_read(written, second):
    position = json.loads(json.dumps({"optimizer_steps": 1, "torch_rng": written(torch.get_rng_state())}))
    expected = torch.rand(3)
    restore_random_states(saved_random_states(position), (1, 1, 1))
    assert torch.equal(torch.rand(3), expected)
    with pytest.raises(KeyError):
        saved_random_states({"optimizer_steps": 1})
