"""The mixer gives what transformers' gives, row by row, on one rank and on several."""

import functools

import pytest
import torch
from safetensors.torch import load_file

from nemotron_steps.engine.policy.mamba.mixer import gated_norm, head_ranges
from nemotron_steps.engine.policy.mamba.scan import time_steps
from nemotron_steps.engine.policy.token_layout import build_layout
from tests.conditioning import assert_conditioned
from tests.engine.policy.batches import grouped_batch
from tests.engine.policy.mamba.mixers import (
    CASES,
    HIDDEN,
    MODELS,
    cut,
    flat_mixer,
    inputs,
    run_mixer,
    scenarios,
    transformers_mixer,
    whole_layout,
)
from tests.engine.policy.ranks import run_ranks


def loaded(groups, **options):
    mixer = flat_mixer(groups, **options)
    theirs = dict(transformers_mixer(groups).named_parameters())
    for name, parameter in mixer.named_parameters():
        parameter.data = theirs[name].data.to(parameter.dtype)
    return mixer


@functools.cache
def alone(model):
    layout = whole_layout()
    return run_mixer(loaded(MODELS[model]), *inputs(layout), layout)


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("share_prompts", [True, False])
def test_equals_transformers(groups, share_prompts):
    """Packed rows of mixed lengths, some of which share a prompt."""
    layout = build_layout(grouped_batch(), range(12), share_prompts=share_prompts, divisible_by=8)
    hidden, upstream = inputs(layout)
    real = layout.token_ids.shape[0] - layout.padding
    upstream[real:] = 0
    found = run_mixer(loaded(groups), hidden, upstream, layout)
    found["out"] = found["out"][:real]
    runs = layout.runs
    ends = runs.lengths.cumsum().tolist()
    rows = [torch.arange(end - length, end) for end, length in zip(ends, runs.lengths.tolist(), strict=True)]
    assert (runs.roots < len(rows)) == share_prompts

    def expected(hidden, upstream, mixer):
        leaf, total = hidden.detach()[:, 0].requires_grad_(), torch.zeros(())
        out = torch.zeros(real, *hidden.shape[1:])
        for number, tokens in enumerate(rows):
            before = rows[runs.parents[number - runs.roots]] if number >= runs.roots else tokens[:0]
            of_row = mixer(leaf[torch.cat([before, tokens])][None])[0, len(before) :]
            out[tokens, 0] = of_row.detach()
            total = total + (of_row * upstream[tokens, 0]).sum()
        names, parameters = zip(*mixer.named_parameters(), strict=True)
        grads = torch.autograd.grad(total, [leaf, *parameters])
        named = zip(("hidden", *names), grads, strict=True)
        return {"out": out} | {name: grad.view_as(found[name]) for name, grad in named}

    assert_conditioned(found, expected, hidden, upstream, transformers_mixer(groups))


def test_half_precision_keeps_float32_parameters():
    mixer = loaded(2, dtype=torch.bfloat16)
    exact = {name for name, parameter in mixer.named_parameters() if parameter.dtype is torch.float32}
    assert exact == {"A_log", "D", "dt_bias"}
    layout = whole_layout()
    hidden, _ = inputs(layout)
    out = mixer(hidden.bfloat16(), layout)
    assert out.dtype is torch.bfloat16
    expected = alone("two groups")["out"]
    torch.testing.assert_close(out.float(), expected, atol=0.05 * float(expected.abs().max()), rtol=0)


def test_time_steps_have_limits():
    dt, bias = torch.tensor([[-4.0, 0.0, 9.0]]), torch.zeros(3)
    assert torch.equal(time_steps(dt, bias, (0.0, float("inf"))), torch.nn.functional.softplus(dt))
    assert time_steps(dt, bias, (0.1, 5.0))[0].tolist() == pytest.approx([0.1, 0.6931472, 5.0])


def test_gated_norm_has_the_gradient_of_its_formula():
    generator = torch.Generator().manual_seed(0)
    y, gate = (torch.randn(5, 12, generator=generator, dtype=torch.float64, requires_grad=True) for _ in range(2))
    weight = torch.randn(12, generator=generator, dtype=torch.float64, requires_grad=True)
    opened = (y * torch.nn.functional.silu(gate)).view(5, 3, 4)
    expected = (opened / (opened.square().mean(-1, keepdim=True) + 1e-5).sqrt()).view(5, 12) * weight
    found = gated_norm(y, gate, weight, 3, 1e-5)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
    upstream = torch.randn(5, 12, generator=generator, dtype=torch.float64)
    mine, theirs = (torch.autograd.grad((out * upstream).sum(), [y, gate, weight]) for out in (found, expected))
    torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("groups", "ranks"), [(4, 2), (2, 2), (2, 4), (1, 8)])
def test_each_rank_gets_its_heads_and_their_groups(groups, ranks):
    heads, head_dim, state = 8, 3, 2
    columns = [("x", h) for h in range(heads) for _ in range(head_dim)]
    columns += [(part, g) for part in "bc" for g in range(groups) for _ in range(state)]
    columns += [("dt", h) for h in range(heads)]
    for rank in range(ranks):
        got = [columns[i] for pair in head_ranges(heads, head_dim, groups, state, rank, ranks) for i in range(*pair)]
        mine = range(rank * heads // ranks, (rank + 1) * heads // ranks)
        shared = sorted({head * groups // heads for head in mine})
        wanted = [("x", h) for h in mine for _ in range(head_dim)]
        wanted += [(part, g) for part in "bc" for g in shared for _ in range(state)]
        assert got == wanted + [("dt", h) for h in mine]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    out = tmp_path_factory.mktemp("mamba")
    run_ranks(2, out, {}, scenarios)
    return out


@pytest.mark.parametrize("case", CASES)
def test_ranks_together_are_one(case, two_ranks):
    model, dims = CASES[case]
    found, expected = load_file(two_ranks / f"{case}.safetensors"), alone(model)
    assert found["out"].shape == (whole_layout().token_ids.shape[0], 1, HIDDEN)
    for name, value in expected.items():
        scale = float(value.abs().max().clamp(min=1))
        if name in ("out", "hidden"):
            torch.testing.assert_close(found[name], value, atol=1e-5 * scale, rtol=1e-4, msg=name)
            continue
        for rank in range(dims.tensor):
            own = cut(name, value, MODELS[model], rank, dims.tensor)
            torch.testing.assert_close(found[f"{name} {rank}"], own, atol=2e-5 * scale, rtol=1e-4, msg=name)
