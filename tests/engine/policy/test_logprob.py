"""Logprobs from hidden states: values, gradients and memory against plain log-softmax."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemotron_steps.engine.kernels.fused import rms_norm, rotate, swiglu
from nemotron_steps.engine.losses.loss import SampledFrom
from nemotron_steps.engine.policy import logprob
from nemotron_steps.engine.policy.logprob import OutputLayer


@settings(max_examples=30, deadline=None)
@given(
    tokens=st.integers(0, 40),
    vocab=st.integers(2, 50),
    padding=st.integers(0, 5),
    chunk=st.integers(1, 50),
    keep=st.booleans(),
    temperature=st.sampled_from([1.0, 0.4, 1.5]),
    seed=st.integers(0, 1000),
)
def test_values_and_gradients_equal_log_softmax(tokens, vocab, padding, chunk, keep, temperature, seed):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, 8, generator=generator, dtype=torch.float32, requires_grad=True)
    weight = torch.randn(vocab + padding, 8, generator=generator, requires_grad=True)
    targets = torch.randint(0, vocab, (tokens,), generator=generator)
    factors = torch.randn(tokens, generator=generator)
    full = (hidden @ weight[:vocab].T / temperature).log_softmax(-1)
    expected = full.gather(1, targets[:, None]).squeeze(1)
    gradients = torch.autograd.grad((expected * factors).sum(), (hidden, weight))
    kept, logprob.KEPT_RESIDUAL_BYTES = logprob.KEPT_RESIDUAL_BYTES, 10**9 if keep else 0
    try:
        found, entropy = logprob.linear_logprobs(
            hidden, weight, targets, OutputLayer(chunk, vocab), sampled_from=SampledFrom(temperature)
        )
        (found * factors).sum().backward()
    finally:
        logprob.KEPT_RESIDUAL_BYTES = kept
    rounding = 1e-5 * max(1.0, temperature**-2)  # differences of logits, which are larger at low temperatures
    torch.testing.assert_close(found, expected, atol=rounding, rtol=1e-5)
    torch.testing.assert_close(entropy, -(full.exp() * full).sum(-1).detach(), atol=2 * rounding, rtol=1e-4)
    assert not entropy.requires_grad
    for mine, theirs in zip((hidden.grad, weight.grad), gradients, strict=True):
        torch.testing.assert_close(mine, theirs, atol=2 * rounding, rtol=1e-4)


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(1, 20),
    vocab=st.integers(2, 30),
    chunk=st.integers(1, 25),
    keep=st.booleans(),
    temperature=st.sampled_from([1.0, 0.6]),
    top_p=st.sampled_from([1.0, 0.9, 0.5, 1e-9]),
    top_k=st.sampled_from([0, 1, 3, 7, 99]),
    seed=st.integers(0, 1000),
)
def test_top_k_and_top_p_leave_a_softmax_over_the_tokens_they_keep(
    tokens, vocab, chunk, keep, temperature, top_p, top_k, seed
):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, 6, generator=generator, dtype=torch.float64).requires_grad_()
    weight = torch.randn(vocab, 6, generator=generator, dtype=torch.float64).requires_grad_()
    targets = torch.randint(0, vocab, (tokens,), generator=generator)
    factors = torch.randn(tokens, generator=generator)
    rows = []
    for row in range(tokens):  # one token after the other, heaviest first, until there are k of them or enough of p
        logits = hidden[row] @ weight.T / temperature
        order = logits.argsort(descending=True).tolist()[: top_k or None]
        shares = logits[order].softmax(-1).tolist()
        kept = [token for i, token in enumerate(order) if i == 0 or sum(shares[:i]) < top_p]
        place = {token: i for i, token in enumerate(kept)}
        rows.append((logits[kept].log_softmax(-1), place.get(int(targets[row]))))
    inside = torch.tensor([at is not None for _, at in rows])
    chosen = [lps[at] * f for (lps, at), f in zip(rows, factors.tolist(), strict=True) if at is not None]
    gradients = torch.autograd.grad(sum(chosen, 0.0 * hidden.sum() + 0.0 * weight.sum()), (hidden, weight))

    leaves = [tensor.detach().float().requires_grad_() for tensor in (hidden, weight)]
    asked, before = SampledFrom(temperature, top_p, top_k), targets.clone()
    kept_bytes, logprob.KEPT_RESIDUAL_BYTES = logprob.KEPT_RESIDUAL_BYTES, 10**9 if keep else 0
    try:
        found, entropy = logprob.linear_logprobs(*leaves, targets, OutputLayer(chunk, vocab), sampled_from=asked)
        (torch.where(inside, found, 0.0) * factors).sum().backward()
    finally:
        logprob.KEPT_RESIDUAL_BYTES = kept_bytes
    assert torch.equal(targets, before)
    assert torch.equal(found.isneginf(), ~inside if asked.truncated else torch.zeros_like(inside))
    expected = torch.tensor([lps[at].item() for lps, at in rows if at is not None])
    torch.testing.assert_close(found[inside], expected, atol=1e-4, rtol=1e-4)
    entropies = torch.tensor([-(lps.exp() * lps).sum().item() for lps, _ in rows])
    torch.testing.assert_close(entropy, entropies, atol=1e-4, rtol=1e-4)
    for leaf, truth in zip(leaves, gradients, strict=True):
        torch.testing.assert_close(leaf.grad, truth.float(), atol=1e-4, rtol=1e-3)


def test_ties_with_the_lightest_kept_token_are_kept():
    hidden, weight = torch.ones(3, 1), torch.tensor([[2.0], [1.0], [1.0], [0.0]])
    found, _ = logprob.linear_logprobs(
        hidden, weight, torch.tensor([1, 2, 3]), OutputLayer(8, 4), sampled_from=SampledFrom(top_k=2)
    )
    kept = torch.tensor([2.0, 1.0, 1.0]).log_softmax(-1)[1].item()
    assert found.tolist() == pytest.approx([kept, kept, -math.inf])


def test_a_hit_is_a_target_that_is_the_most_likely_token():
    generator = torch.Generator().manual_seed(0)
    # Whole numbers, so that equal logits are common and equal to the bit.
    hidden, weight = (torch.randint(-2, 3, (rows, 6), generator=generator).float() for rows in (60, 12))
    logits = hidden @ weight[:11].T  # the last row is padding
    likely, also = logits.max(-1).indices, 10 - logits.flip(-1).max(-1).indices
    targets = torch.stack((likely, also, (likely + 1) % 11))[torch.arange(60) % 3, torch.arange(60)]
    logprobs, hits = logprob.linear_predictions(hidden, weight, targets, OutputLayer(7, 11))
    torch.testing.assert_close(logprobs, logits.log_softmax(-1).gather(1, targets[:, None]).squeeze(1))
    assert torch.equal(hits, (targets == likely).float())  # of equals the first counts


def test_memory_does_not_grow_with_tokens_times_vocabulary():
    tokens, vocab, width, chunk = 3000, 7000, 16, 250
    hidden = torch.randn(tokens, width, requires_grad=True)
    weight = torch.randn(vocab, width, requires_grad=True)
    assert tokens * vocab * 4 > logprob.KEPT_RESIDUAL_BYTES
    kept = []

    def pack(tensor):
        kept.append(tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        logprob.linear_logprobs(hidden, weight, torch.randint(0, vocab, (tokens,)), OutputLayer(chunk, vocab))
    assert sum(kept) < 4 * (2 * tokens * width + vocab * width + 4 * tokens) + 1


def test_a_huge_logit_does_not_overflow():
    hidden = torch.tensor([[100.0, 0.0], [-100.0, 50.0]], requires_grad=True)
    weight = torch.tensor([[10.0, 0.0], [-10.0, 0.0], [0.0, 10.0]])
    found, entropy = logprob.linear_logprobs(hidden, weight, torch.tensor([0, 2]), OutputLayer(8, 3))
    assert bool(found.isfinite().all()) and bool(entropy.isfinite().all())
    assert found[0] == 0.0 and found[1] == -500.0


@pytest.mark.parametrize("dtype", [torch.float64])
def test_written_out_gradients(dtype):
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=dtype, requires_grad=True)

    angles = torch.rand(4, 1, 1, 3, generator=generator, dtype=dtype).repeat(1, 1, 1, 2)
    cos_sin = torch.stack((angles.cos(), angles.sin()))
    assert torch.autograd.gradcheck(swiglu, (random(3, 8),))
    assert torch.autograd.gradcheck(lambda states: rotate(states, cos_sin), (random(4, 2, 2, 6),))
    from nemotron_steps.engine.kernels.fused import _RmsNorm

    for shape in ((6,), (2, 6)):
        assert torch.autograd.gradcheck(lambda s, w: _RmsNorm.apply(s, w, 1e-6), (random(4, 3, 2, 6), random(*shape)))
    states, weight = random(5, 6), random(6)
    torch.testing.assert_close(
        rms_norm(states.float(), weight.float(), 1e-6),
        torch.nn.functional.rms_norm(states.float(), (6,), weight.float(), 1e-6),
    )


CUDA = pytest.param("cuda", marks=pytest.mark.cuda)


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("keep", [True, False])
def test_in_16_bits_tokens_that_the_policy_is_sure_of_have_the_gradient_of_what_is_left(device, keep, monkeypatch):
    """From p = 0.35 to 0.999985. A difference of products rounded to 16 bits would be all rounding at the end, and so
    would one of a logit and a log-sum-exp that are both large."""
    monkeypatch.setattr(logprob, "KEPT_RESIDUAL_BYTES", 10**9 if keep else 0)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(97, 256, generator=generator)
    targets = torch.arange(24)
    sureness = torch.linspace(4, 16, 24)[:, None]
    hidden = weight[targets] / weight[targets].square().sum(-1, keepdim=True) * sureness
    hidden = hidden.to(device, torch.bfloat16).requires_grad_()
    weight = weight.to(device, torch.bfloat16).requires_grad_()
    targets = targets.to(device)
    found, entropy = logprob.linear_logprobs(hidden, weight, targets, OutputLayer(7, 97))
    grad = torch.rand(24, generator=generator).to(device, torch.bfloat16).float() + 0.5
    (found * grad).sum().backward()

    # What softmax of the very logits that 16 bits give says, from there on in float64.
    logits = torch.nn.functional.linear(hidden.detach(), weight.detach()).double()
    exact = logits.log_softmax(-1)
    residuals = torch.nn.functional.one_hot(targets, 97) - exact.exp()
    assert residuals.gather(1, targets[:, None]).min() < 2e-5
    torch.testing.assert_close(found.double(), exact.gather(1, targets[:, None]).squeeze(1), atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(entropy.double(), -(exact.exp() * exact).sum(-1), atol=2e-5, rtol=0.03)
    for mine, truth in (
        (hidden.grad, grad.double()[:, None] * (residuals @ weight.detach().double())),
        (weight.grad, residuals.t() @ (grad.double()[:, None] * hidden.detach().double())),
    ):
        error = (mine.double() - truth).norm(dim=-1) / truth.norm(dim=-1)
        assert error.max() < 0.02


@pytest.mark.parametrize(("start", "rows"), [(0, 4), (4, 4), (8, 2), (12, 0), (16, 0)])
def test_padded_rows_stand_for_no_token(start, rows):
    assert OutputLayer(8, vocab_size=10, vocab_start=start).rows(torch.ones(4, 3)).shape == (rows, 3)


def test_tokens_of_other_ranks_are_not_this_ones():
    layer, logits = OutputLayer(8, vocab_size=12, vocab_start=4), torch.arange(8.0).view(2, 4)
    found, mine, columns = layer.at(logits, torch.tensor([[3, 4, 7, 8], [7, 5, 0, 11]]))
    assert mine.tolist() == [[False, True, True, False], [True, True, False, False]]
    assert found.tolist() == [[0.0, 0.0, 3.0, 0.0], [7.0, 5.0, 0.0, 0.0]]
    assert columns[mine].tolist() == [0, 3, 3, 1]
    none = layer.at(logits[:, :0], torch.tensor([[4], [5]]))
    assert none[0].tolist() == [[0.0], [0.0]] and not none[1].any()
