import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemotron_steps.config.schema.grpo import LossFnConfig
from nemotron_steps.engine.losses.loss import (
    LossNormalizers,
    SampledFrom,
    count_normalizers,
    finalize_metrics,
    merge_metric_sums,
)
from nemotron_steps.engine.losses.policy_gradient import PolicyGradientLoss
from nemotron_steps.engine.types import TrainBatch
from tests.engine.engine_samples import random_batch, rows_of
from tests.engine.losses.loss_oracle import Oracle

TIS = {
    "use_importance_sampling_correction": True,
    "truncated_importance_sampling_type": "tis",
    "truncated_importance_sampling_ratio": 1.2,
}
CONFIGS: dict[str, dict[str, object]] = {
    "ppo": {},
    "ppo_sequence_loss": {"token_level_loss": False},
    "dual_clip": {"ratio_clip_c": 1.5},
    "on_policy_tis_as_super3": {"force_on_policy_ratio": True, **TIS},
    "reinforce": {"disable_ppo_ratio": True},
    "cispo": {"use_cispo": True},
    "gspo": {"sequence_level_importance_ratios": True, "token_level_loss": False},
    "gspo_corrected": {
        "sequence_level_importance_ratios": True,
        "token_level_loss": False,
        **TIS,
        "truncated_importance_sampling_ratio": 2.0,
    },
    "correction_without_truncation": {"use_importance_sampling_correction": True},
    "icepop": {
        "use_importance_sampling_correction": True,
        "truncated_importance_sampling_type": "icepop",
        "truncated_importance_sampling_ratio": 1.3,
        "truncated_importance_sampling_ratio_min": 0.8,
    },
    "seq_mask_tis": {
        "use_importance_sampling_correction": True,
        "truncated_importance_sampling_type": "seq-mask-tis",
        "truncated_importance_sampling_ratio": 1.05,
        "truncated_importance_sampling_ratio_min": 0.9,
    },
    "k1": {"reference_policy_kl_penalty": 0.1, "reference_policy_kl_type": "k1"},
    "k2_sequence": {
        "reference_policy_kl_penalty": 0.1,
        "reference_policy_kl_type": "k2",
        "token_level_loss": False,
    },
    "k3": {"reference_policy_kl_penalty": 0.1},
    "k3_clamped": {"reference_policy_kl_penalty": 0.1, "kl_input_clamp_value": 0.3, "kl_output_clamp_value": 0.02},
    "k3_on_policy_weight": {"reference_policy_kl_penalty": 0.1, "use_on_policy_kl_approximation": True},
    "k3_on_policy_weight_clamped": {
        "reference_policy_kl_penalty": 0.1,
        "use_on_policy_kl_approximation": True,
        "kl_input_clamp_value": 0.3,
        "kl_output_clamp_value": 0.02,
    },
    "k1_on_policy_weight_clamped": {
        "reference_policy_kl_penalty": 0.1,
        "reference_policy_kl_type": "k1",
        "use_on_policy_kl_approximation": True,
        "kl_input_clamp_value": 0.3,
        "kl_output_clamp_value": None,
    },
    "on_policy_kl_as_super3_rlhf": {
        "force_on_policy_ratio": True,
        "reference_policy_kl_penalty": 0.1,
        "use_on_policy_kl_approximation": True,
        "kl_input_clamp_value": None,
        "kl_output_clamp_value": None,
        **TIS,
    },
    "gspo_on_policy": {
        "force_on_policy_ratio": True,
        "sequence_level_importance_ratios": True,
        "token_level_loss": False,
        **TIS,
        "truncated_importance_sampling_ratio": 2.0,
    },
    "kl_in_reward": {"reference_policy_kl_penalty": 0.1, "use_kl_in_reward": True},
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("seed", [0, 1])
def test_value_and_gradient_are_those_of_the_contract_written_as_loops(name: str, seed: int) -> None:
    config = LossFnConfig.model_validate(CONFIGS[name])
    batch, lp = random_batch(rows=5, width=7, seed=seed)
    batch.advantages += torch.randn(batch.advantages.shape, generator=torch.Generator().manual_seed(seed))
    loss, _ = PolicyGradientLoss(config)(lp, batch, count_normalizers(batch))
    loss.backward()
    oracle, point = Oracle(batch, config), lp.detach().numpy().astype(float)
    assert loss.item() == pytest.approx(oracle.loss(point), rel=2e-5)
    assert lp.grad is not None
    slopes = torch.zeros_like(lp, dtype=torch.float64)
    for n, ts in oracle.sequences:
        for t in ts:
            slopes[n, t] = oracle.gradient(point, n, t)
    torch.testing.assert_close(lp.grad.double(), slopes, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("name", CONFIGS)
def test_metrics_are_those_of_the_contract_written_as_loops(name: str) -> None:
    config = LossFnConfig.model_validate(CONFIGS[name])
    batch, lp = random_batch(seed=7)
    normalizers = count_normalizers(batch)
    _, sums = PolicyGradientLoss(config)(lp, batch, normalizers)
    metrics = finalize_metrics(sums, normalizers)
    expected = Oracle(batch, config).metrics(lp.detach().numpy().astype(float))
    assert {key: metrics[key] for key in expected} == pytest.approx(expected, rel=2e-4, abs=1e-6)
    assert {key for key in metrics if "ratio" in key or "kl_p" in key} <= set(expected)


def one_token(adv: float, lp: float, prev: float, gen: float, ref: float = -1.0) -> tuple[TrainBatch, torch.Tensor]:
    def row(x: float) -> torch.Tensor:
        return torch.tensor([[0.0, x]])

    batch = TrainBatch(
        torch.zeros(1, 2, dtype=torch.long), torch.tensor([2]), row(1.0), torch.ones(1), row(gen), row(adv), row(prev),
        row(ref),
    )  # fmt: skip
    return batch, row(lp).requires_grad_()


ONE = LossNormalizers(1.0, 1.0)


def test_the_expected_gradient_of_the_kl_term_is_the_gradient_of_the_true_kl() -> None:
    """Over a whole vocabulary, samples weighted by their probability: this is why the score term is there."""
    logits = torch.tensor([0.3, -0.2, 0.9, 0.1], dtype=torch.float64, requires_grad=True)
    ref = torch.log_softmax(torch.tensor([0.0, 0.5, 0.2, -0.6], dtype=torch.float64), -1)
    lp = torch.log_softmax(logits, -1)
    true = (lp.exp() * (lp - ref)).sum()
    (expected,) = torch.autograd.grad(true, logits, retain_graph=True)
    probabilities = lp.detach().exp()
    for kind in ("k1", "k3"):
        loss_fn = PolicyGradientLoss(
            LossFnConfig(reference_policy_kl_penalty=1.0, reference_policy_kl_type=kind, force_on_policy_ratio=True)  # type: ignore[arg-type]
        )
        total = torch.zeros(4, dtype=torch.float64)
        for token in range(4):
            batch, _ = one_token(0.0, 0.0, 0.0, lp[token].item(), ref[token].item())
            row = torch.stack([torch.zeros((), dtype=torch.float64), lp[token]]).unsqueeze(0)
            loss, _ = loss_fn(row, batch, ONE)
            (gradient,) = torch.autograd.grad(loss, logits, retain_graph=True)
            total += probabilities[token] * gradient
        assert torch.allclose(total, expected, atol=1e-6)


SPLITS = st.lists(st.integers(0, 2), min_size=6, max_size=6)


@settings(max_examples=15, deadline=None)
@given(name=st.sampled_from(sorted(CONFIGS)), parts=SPLITS, seed=st.integers(0, 1000))
def test_loss_gradient_and_metrics_do_not_depend_on_the_micro_batches(name: str, parts: list[int], seed: int) -> None:
    config = LossFnConfig.model_validate(CONFIGS[name])
    loss_fn = PolicyGradientLoss(config)
    batch, lp = random_batch(seed=seed)
    normalizers = count_normalizers(batch)
    whole, sums = loss_fn(lp, batch, normalizers)
    whole.backward()
    again = lp.detach().clone().requires_grad_()
    losses, collected = [], []
    for part in sorted(set(parts)):
        rows = [row for row in range(6) if parts[row] == part]
        loss, partial = loss_fn(again[rows], rows_of(batch, rows), normalizers)
        loss.backward()
        losses.append(loss.item())
        collected.append(partial)
    assert sum(losses) == pytest.approx(whole.item(), rel=1e-5, abs=1e-6)
    assert lp.grad is not None and again.grad is not None
    torch.testing.assert_close(again.grad, lp.grad, rtol=1e-5, atol=1e-7)
    split = finalize_metrics(merge_metric_sums(collected), normalizers)
    assert split == pytest.approx(finalize_metrics(sums, normalizers), rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("name", CONFIGS)
def test_padding_wider_changes_nothing(name: str) -> None:
    config = LossFnConfig.model_validate(CONFIGS[name])
    batch, lp = random_batch(seed=5)
    wide = TrainBatch(
        **{
            k: torch.nn.functional.pad(v, (0, 7), value=0 if k in ("token_mask", "input_ids") else float("nan"))
            if v is not None and v.dim() == 2
            else v
            for k, v in vars(batch).items()
        }
    )
    normalizers = count_normalizers(batch)
    assert count_normalizers(wide) == normalizers
    padded = torch.nn.functional.pad(lp, (0, 7), value=-float("inf"))
    narrow_loss, _ = PolicyGradientLoss(config)(lp, batch, normalizers)
    wide_loss, _ = PolicyGradientLoss(config)(padded, wide, normalizers)
    assert wide_loss.item() == pytest.approx(narrow_loss.item(), rel=1e-6)


def test_generator_logprobs_that_are_not_finite_drop_the_token_not_the_run() -> None:
    for bad in (-math.inf, math.nan, -300.0):  # the last is finite, and the ratio to it is not
        batch, lp = random_batch(noise_in_padding=False)
        batch.generation_logprobs[1, 3] = bad
        config = LossFnConfig(reference_policy_kl_penalty=0.1, use_on_policy_kl_approximation=True, **TIS)  # type: ignore[arg-type]
        loss, _ = PolicyGradientLoss(config)(lp, batch, count_normalizers(batch))
        loss.backward()
        assert torch.isfinite(loss) and lp.grad is not None and torch.isfinite(lp.grad).all()
        assert lp.grad[1, 3] == 0.0
        assert math.isfinite(PolicyGradientLoss(config)(lp, batch, count_normalizers(batch))[1]["approx_entropy"])


def test_on_policy_training_measures_from_the_current_logprobs_also_where_others_were_computed_for_a_mask() -> None:
    on_policy = PolicyGradientLoss(LossFnConfig(force_on_policy_ratio=True, **TIS))  # type: ignore[arg-type]
    batch, lp = random_batch()  # prev_logprobs are 0.3 nats beside the current ones
    normalizers = count_normalizers(batch)
    found, sums = on_policy(lp, batch, normalizers)
    (gradient,) = torch.autograd.grad(found, lp)
    batch.prev_logprobs = None
    expected, expected_sums = on_policy(lp, batch, normalizers)
    assert found.item() == expected.item()
    assert torch.equal(gradient, torch.autograd.grad(expected, lp)[0])
    assert finalize_metrics(sums, normalizers) == finalize_metrics(expected_sums, normalizers)


@pytest.mark.parametrize("on_policy", [True, False])
def test_under_top_p_a_token_that_the_policy_would_not_have_kept_teaches_nothing(on_policy: bool) -> None:
    config = LossFnConfig(force_on_policy_ratio=on_policy, **TIS)  # type: ignore[arg-type]
    truncated = PolicyGradientLoss(config, SampledFrom(top_p=0.9))
    batch, lp = random_batch()
    assert batch.prev_logprobs is not None
    normalizers = count_normalizers(batch)
    outside = torch.zeros_like(lp, dtype=torch.bool)
    outside[0, 4] = outside[1, 2] = True
    now = outside.clone()
    if not on_policy:  # one of them is left out by the policy that started the step alone
        now[1, 2] = False
        batch.prev_logprobs[1, 2] = -torch.inf
    given = torch.where(now, -torch.inf, lp.detach()).requires_grad_()
    loss, sums = truncated(given, batch, normalizers)
    loss.backward()
    whole = batch.token_mask.clone()
    batch.token_mask = batch.token_mask * ~outside
    expected, _ = PolicyGradientLoss(config)(lp, batch, normalizers)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    torch.testing.assert_close(given.grad, lp.grad)
    metrics = finalize_metrics(sums, normalizers)
    assert metrics["outside_truncation"] == pytest.approx(2 / normalizers.tokens)
    assert metrics["num_valid_tokens"] == normalizers.tokens
    assert all(math.isfinite(value) for value in metrics.values())
    assert whole.sum() == batch.token_mask.sum() + 2
