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
