"""KL estimators and importance weights."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nemotron_steps.engine.losses.policy_gradient import (
    importance_weights,
    kl_divergence,
    truncate_weights,
)

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


MASK = torch.tensor([[0.0, 1.0, 1.0]])
GEN = torch.zeros(1, 3)


def prev(a: float, b: float) -> torch.Tensor:
    return torch.tensor([[float("nan"), a, b]])


def test_token_weights_and_the_exact_sequence_ratio() -> None:
    assert importance_weights(prev(0.1, -0.2), GEN, MASK)[0, 1:].tolist() == pytest.approx(
        [math.exp(0.1), math.exp(-0.2)]
    )
    whole = importance_weights(prev(0.1, -0.2), GEN, MASK, sequence_level=True)
    assert whole.shape == (1, 1) and whole.item() == pytest.approx(math.exp(-0.1))  # the sum, not the mean


@pytest.mark.parametrize(
    ("kind", "lower", "outside"),
    [("tis", None, [0, 0, 0, 0, 1]), ("tis", 0.5, [1, 1, 0, 0, 1]), ("icepop", 0.5, [1, 1, 0, 0, 1])],
)
def test_a_weight_on_a_bound_is_within(kind: Any, lower: float | None, outside: list[int]) -> None:
    weights = torch.tensor([[0.0, 0.25, 0.5, 2.0, 2.5]])
    _, out_of_bounds = truncate_weights(weights, weights, weights, weights, kind=kind, upper=2.0, lower=lower)
    assert out_of_bounds.tolist() == [outside]
