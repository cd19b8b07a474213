from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nemotron_steps.engine.losses.ratios import kl_divergence

LOGPROB = st.floats(-30, 0, allow_nan=False)


@given(lp=LOGPROB, ref=LOGPROB)
def test_k3_and_k2_are_never_negative_and_every_estimator_is_bounded(lp: float, ref: float) -> None:
    a, b = torch.tensor(lp, dtype=torch.float64), torch.tensor(ref, dtype=torch.float64)
    for kind in ("k1", "k2", "k3"):
        value = kl_divergence(a, b, kind).item()  # type: ignore[arg-type]
        assert abs(value) <= 10.0
        assert kind == "k1" or value >= 0.0
    assert kl_divergence(a, a).item() == 0.0


def test_clamps_are_where_the_contract_puts_them() -> None:
    lp, ref = torch.tensor(-25.0, dtype=torch.float64), torch.tensor(0.0, dtype=torch.float64)
    free = {"input_clamp": None, "output_clamp": None}
    assert kl_divergence(lp, ref, "k1", **free).item() == -25.0  # type: ignore[arg-type]
    assert kl_divergence(lp, ref, "k1", input_clamp=20.0, output_clamp=None).item() == -20.0
    assert kl_divergence(lp, ref, "k1").item() == -10.0
    assert kl_divergence(lp, ref, "k3", **free).item() == pytest.approx(math.exp(25) - 26)  # type: ignore[arg-type]
    assert kl_divergence(lp, ref, "k3").item() == 10.0


def test_k1_and_k3_are_unbiased_over_a_whole_vocabulary() -> None:
    torch.manual_seed(0)
    p = torch.log_softmax(torch.randn(50, dtype=torch.float64), -1)
    q = torch.log_softmax(torch.randn(50, dtype=torch.float64), -1)
    true = (p.exp() * (p - q)).sum().item()
    for kind in ("k1", "k3"):
        estimate = (p.exp() * kl_divergence(p, q, kind, input_clamp=None, output_clamp=None)).sum().item()  # type: ignore[arg-type]
        assert estimate == pytest.approx(true, rel=1e-12)


def test_k3_keeps_its_digits_near_zero_in_float32() -> None:
    lp = torch.tensor(-1.0)
    value = kl_divergence(lp, lp + 1e-3).item()
    assert value == pytest.approx(5e-7, rel=0.02)


def test_an_unknown_estimator_is_refused() -> None:
    with pytest.raises(ValueError, match="k1, k2 or k3"):
        kl_divergence(torch.zeros(1), torch.zeros(1), "k4")  # type: ignore[arg-type]
