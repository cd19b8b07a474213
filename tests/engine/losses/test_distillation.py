"""The loss of on-policy distillation against its formulas in float64, token by token."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemotron_steps.engine.losses.distillation import DistillationLoss, TeacherKl
from nemotron_steps.engine.losses.loss import count_normalizers, finalize_metrics, loss_mask
from nemotron_steps.engine.policy.logprob import OutputLayer, TopkTokens, linear_divergence, linear_topk
from tests.engine.engine_samples import random_batch

KINDS = [TeacherKl(kind, 0.3, zero) for kind, zero in itertools.product(("forward", "reverse", "mixed"), (False, True))]
TOKENS, VOCAB, WIDTH, K = 9, 23, 6, 4


def plain(kl, logits, teacher_logits, tokens):
    """The definition, with every distribution whole: float64 [R]."""
    q = teacher_logits.gather(1, tokens).log_softmax(-1)
    if kl.zero_outside_topk:
        log_p = logits.log_softmax(-1)
        log_q = torch.full_like(logits, -100.0).scatter(1, tokens, q)
        forward = (q.exp() * (q - log_p.gather(1, tokens))).sum(-1)
    else:
        log_p, log_q = logits.gather(1, tokens).log_softmax(-1), q
        forward = (q.exp() * (q - log_p)).sum(-1)
    reverse = (log_p.exp() * (log_p - log_q)).sum(-1)
    weight = {"forward": 1.0, "reverse": 0.0, "mixed": kl.mixed_kl_weight}[kl.kl_type]
    return weight * forward + (1 - weight) * reverse


def models(seed, padding=2):
    """hidden and output weight of policy and teacher, and the sampled tokens."""
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randn(rows, WIDTH, generator=generator) for rows in (TOKENS, VOCAB + padding) * 2]
    return *drawn, torch.randint(0, VOCAB, (TOKENS,), generator=generator)


@pytest.mark.parametrize("kl", KINDS, ids=lambda kl: f"{kl.kl_type}, {'zero' if kl.zero_outside_topk else 'top k'}")
@pytest.mark.parametrize("chunk", [1, 4, 50])
@pytest.mark.parametrize("k", [1, K, VOCAB])
def test_divergence_and_gradients_are_those_of_the_definition(kl, chunk, k):
    hidden, weight, teacher_hidden, teacher_weight, targets = models(chunk)
    layer = OutputLayer(chunk, VOCAB)
    logprobs, heaviest, tokens = linear_topk(k, teacher_hidden, teacher_weight, targets, layer)
    teacher_logits = (teacher_hidden @ teacher_weight[:VOCAB].T).double()
    whole = teacher_logits.log_softmax(-1)
    torch.testing.assert_close(logprobs.double(), whole.gather(1, targets[:, None])[:, 0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(heaviest.double(), whole.topk(k).values, atol=1e-5, rtol=1e-5)
    assert torch.equal(tokens.long(), whole.topk(k).indices)

    factors = torch.linspace(-1, 2, TOKENS)
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    found, own, entropy = linear_divergence(TopkTokens(kl), *leaves, targets, heaviest, tokens, layer)
    gradients = torch.autograd.grad((found * factors).sum(), leaves)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    logits = exact[0] @ exact[1][:VOCAB].T
    expected = plain(kl, logits, teacher_logits, tokens.long())
    truth = torch.autograd.grad((expected * factors.double()).sum(), exact)
    # Outside of the k heaviest log q is -100, which magnifies the rounding of float32.
    close = {"atol": 1e-4, "rtol": 1e-4} if kl.zero_outside_topk else {"atol": 1e-5, "rtol": 1e-5}
    torch.testing.assert_close(found.double(), expected, **close)
    for mine, theirs in zip(gradients, truth, strict=True):
        torch.testing.assert_close(mine.double(), theirs, **close)
    log_p = logits.detach().log_softmax(-1)
    torch.testing.assert_close(own.double(), log_p.gather(1, targets[:, None])[:, 0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy.double(), -(log_p.exp() * log_p).sum(-1), atol=1e-5, rtol=1e-5)
    assert not own.requires_grad and not entropy.requires_grad


def test_over_the_whole_vocabulary_it_is_the_kl_divergence_and_none_from_itself():
    hidden, weight, teacher_hidden, teacher_weight, targets = models(1)
    layer = OutputLayer(4, VOCAB)
    p = (hidden @ weight[:VOCAB].T).double().log_softmax(-1)
    q = (teacher_hidden @ teacher_weight[:VOCAB].T).double().log_softmax(-1)
    other = linear_topk(VOCAB, teacher_hidden, teacher_weight, targets, layer)[1:]
    itself = linear_topk(VOCAB, hidden, weight, targets, layer)[1:]
    for kind, wanted in (("forward", (q.exp() * (q - p)).sum(-1)), ("reverse", (p.exp() * (p - q)).sum(-1))):
        for zero in (False, True):
            kl = TeacherKl(kind, 0.5, zero)
            found = linear_divergence(TopkTokens(kl), hidden, weight, targets, *other, layer)[0]
            torch.testing.assert_close(found.double(), wanted, atol=1e-4, rtol=1e-4)
            none = linear_divergence(TopkTokens(kl), hidden, weight, targets, *itself, layer)[0]
            torch.testing.assert_close(none, torch.zeros(TOKENS), atol=1e-4, rtol=0)


def test_memory_does_not_grow_with_tokens_times_vocabulary():
    tokens, vocab, chunk = 600, 7000, 50
    hidden, weight = torch.randn(tokens, 8, requires_grad=True), torch.randn(vocab, 8, requires_grad=True)
    teacher = torch.zeros(tokens, 3), torch.arange(3, dtype=torch.int32).expand(tokens, 3)
    kept = []

    def pack(tensor):
        kept.append(tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        linear_divergence(
            TopkTokens(TeacherKl()),
            hidden,
            weight,
            torch.zeros(tokens, dtype=torch.long),
            *teacher,
            OutputLayer(chunk, vocab),
        )
    assert sum(kept) < chunk * vocab * 4


def test_the_loss_is_the_mean_over_all_trained_tokens_of_the_global_batch():
    batch, lp = random_batch()
    normalizers = count_normalizers(batch)
    mask = loss_mask(batch.token_mask, batch.sample_mask).bool()
    divergence = torch.rand(lp.shape, generator=torch.Generator().manual_seed(0))
    divergence[~mask] = math.nan  # nothing is known there
    divergence.requires_grad_()
    loss, sums = DistillationLoss(TeacherKl())(lp, batch, normalizers, None, divergence)
    wanted = divergence.detach()[mask].double().mean().item()
    assert loss.item() == pytest.approx(wanted, rel=1e-6)
    found = finalize_metrics(sums, normalizers)
    assert found["teacher_divergence"] == pytest.approx(wanted, rel=1e-6)
    drift = (batch.generation_logprobs - lp.detach())[mask].abs().exp().mean().item()
    assert found["token_mult_prob_error"] == pytest.approx(drift, rel=1e-5)
    ratio = (lp.detach() - batch.generation_logprobs)[mask].double()
    assert found["gen_kl_error"] == pytest.approx((ratio.expm1() - ratio).mean().item(), rel=1e-4)
    assert found["policy_kl_error"] == pytest.approx(((-ratio).expm1() + ratio).mean().item(), rel=1e-4)
    loss.backward()
    torch.testing.assert_close(divergence.grad, mask.float() / mask.sum())
    assert lp.grad is None


def test_the_mass_of_the_heaviest_tokens_is_the_mean_over_trained_tokens():
    batch, lp = random_batch()
    mask = loss_mask(batch.token_mask, batch.sample_mask).bool()
    shares = torch.rand(*lp.shape, 3, generator=torch.Generator().manual_seed(0)) / 3
    batch.teacher_topk_logprobs = torch.where(mask[..., None], shares.log(), 0.0)
    normalizers = count_normalizers(batch)
    _, sums = DistillationLoss(TeacherKl())(lp, batch, normalizers, None, torch.zeros_like(lp))
    found = finalize_metrics(sums, normalizers)["teacher_topk_mass"]
    assert found == pytest.approx(shares[mask].sum(-1).mean().item(), rel=1e-5)


@settings(max_examples=25)
@given(
    rows=st.integers(1, 4),
    vocab=st.integers(2, 12),
    k=st.integers(1, 12),
    sharpness=st.sampled_from([1e-3, 1.0, 30.0]),
    weight=st.floats(0, 1),
    zero=st.booleans(),
    seed=st.integers(0, 999),
)
def test_values_and_gradients_are_those_of_autograd_however_sharp_the_distributions(
    rows, vocab, k, sharpness, weight, zero, seed
):
    k = min(k, vocab)
    generator = torch.Generator().manual_seed(seed)
    logits, teacher = (sharpness * torch.randn(2, rows, vocab, generator=generator, dtype=torch.float64)).unbind()
    logits.requires_grad_()
    log_p, log_q = logits.log_softmax(-1), teacher.log_softmax(-1)
    close = {"atol": 1e-9 * max(1.0, sharpness), "rtol": 1e-9}

    whole = TeacherKl("mixed", weight)
    forward, reverse = (log_q.exp() * (log_q - log_p)).sum(-1), (log_p.exp() * (log_p - log_q)).sum(-1)
    expected = weight * forward + (1 - weight) * reverse
    truth = torch.autograd.grad(expected.sum(), logits, retain_graph=True)[0]
    cut = vocab // 2  # over two ranks: each has a part of the vocabulary, and the sums of both
    sums: list[torch.Tensor] = []
    for part in (slice(0, cut), slice(cut, None)):
        whole.of_all(log_p.detach()[:, part], log_q[:, part], lambda own: sums.append(own) or own)
    for part in (slice(0, cut), slice(cut, None)):
        value, gradient = whole.of_all(log_p.detach()[:, part], log_q[:, part], lambda _: sums[0] + sums[1])
        torch.testing.assert_close(value, expected.detach(), **close)
        torch.testing.assert_close(gradient, truth[:, part], **close)
    assert (value > -1e-9 * sharpness - 1e-12).all()

    tokens = teacher.topk(k).indices
    kl = TeacherKl("mixed", weight, zero)
    expected = plain(kl, logits, teacher, tokens)
    truth = torch.autograd.grad(expected.sum(), logits)[0]
    lse, entropy = logits.detach().logsumexp(-1), -(log_p.exp() * log_p).sum(-1).detach()
    q = log_q.gather(1, tokens).log_softmax(-1)
    value, at_chosen, everywhere = kl.of_chosen(logits.detach().gather(1, tokens), q, lse, -entropy)
    gradient = torch.zeros_like(teacher).scatter_add_(1, tokens, at_chosen)
    if everywhere is not None:
        gradient += log_p.detach().exp() * (everywhere[:, None] + (1 - kl.forward) * log_p.detach())
    torch.testing.assert_close(value, expected.detach(), atol=1e-8 * max(1.0, sharpness), rtol=1e-8)
    torch.testing.assert_close(gradient, truth, atol=1e-8 * max(1.0, sharpness), rtol=1e-8)
    # A shift of all logits is no change of a distribution.
    torch.testing.assert_close(gradient.sum(-1), torch.zeros(rows, dtype=torch.float64), atol=1e-6, rtol=0)
