"""Attention by families against scaled_dot_product_attention over the same layout."""

from __future__ import annotations

import pytest
import torch

from nemotron_steps.engine.policy import family_attention
from nemotron_steps.engine.policy.attention import FlatAttention
from nemotron_steps.engine.policy.layout import build_layout
from tests.policy.batches import grouped_batch


def attend(batch, heads, kv_heads, divisible_by):
    layout = build_layout(batch, range(len(batch)), divisible_by=divisible_by)
    used = layout.families(kv_heads, heads) is not None
    generator = torch.Generator().manual_seed(1)
    tokens = layout.token_ids.shape[0]
    leaves = [
        torch.randn(tokens, count, 16, generator=generator, requires_grad=True) for count in (heads, kv_heads, kv_heads)
    ]
    out = FlatAttention(None)(*leaves, layout)
    out.backward(torch.randn(out.shape, generator=generator))
    return used, [out.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("prompts", [((20, 3), (33, 3)), ((20, 4), (20, 4), (20, 4)), ((9, 2),)])
@pytest.mark.parametrize(("heads", "kv_heads", "divisible_by"), [(4, 2, 1), (4, 4, 64), (6, 2, 8)])
def test_values_and_gradients(monkeypatch, prompts, heads, kv_heads, divisible_by):
    batch = grouped_batch(prompts=prompts) if sum(n for _, n in prompts) > 3 else _pair()
    used, found = attend(batch, heads, kv_heads, divisible_by)
    assert used
    monkeypatch.setattr(family_attention, "SCORES", 0)
    used, expected = attend(batch, heads, kv_heads, divisible_by)
    assert not used
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)


def test_rows_that_are_not_families_go_another_way():
    batch = grouped_batch(prompts=((20, 3), (33, 2), (5, 1)))
    assert not attend(batch, 4, 2, 1)[0]


def _pair():
    """One prompt, two answers of one length."""
    batch = grouped_batch(prompts=((9, 4),))
    batch.lengths[:] = 20
    batch.token_mask[:] = 0
    batch.token_mask[:, 9:20] = 1
    for name in ("input_ids", "lengths", "token_mask", "sample_mask", "generation_logprobs", "advantages"):
        setattr(batch, name, getattr(batch, name)[:2])
    return batch
