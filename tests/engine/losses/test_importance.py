from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from nemotron_steps.engine.losses.ratios import (
    importance_weights,
    truncate_weights,
)

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
    got = truncate_weights(weights, weights, weights, weights, kind=kind, upper=2.0, lower=lower)
    assert got.out_of_bounds is not None and got.out_of_bounds.tolist() == [outside]
