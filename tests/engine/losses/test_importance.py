from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nemotron_steps.engine.losses.ratios import (
    importance_weights,
    sequence_logprob_error,
    truncate_weights,
)

MASK = torch.tensor([[0.0, 1.0, 1.0]])
GEN = torch.zeros(1, 3)


def prev(a: float, b: float) -> torch.Tensor:
    return torch.tensor([[float("nan"), a, b]])


def truncate(a: float, b: float, kind: str, upper: float, lower: float | None) -> list[float]:
    logprobs = prev(a, b)
    weights = importance_weights(logprobs, GEN, MASK)
    got = truncate_weights(weights, logprobs, GEN, MASK, kind=kind, upper=upper, lower=lower)  # type: ignore[arg-type]
    return got.weights[0, 1:].tolist()


def test_token_weights_and_the_exact_sequence_ratio() -> None:
    assert importance_weights(prev(0.1, -0.2), GEN, MASK)[0, 1:].tolist() == pytest.approx(
        [math.exp(0.1), math.exp(-0.2)]
    )
    whole = importance_weights(prev(0.1, -0.2), GEN, MASK, sequence_level=True)
    assert whole.shape == (1, 1) and whole.item() == pytest.approx(math.exp(-0.1))  # the sum, not the mean


def test_weights_that_are_not_finite_become_zero_and_tis_keeps_them_there() -> None:
    for bad in (math.nan, math.inf, 1000.0):
        assert importance_weights(prev(bad, 0.0), GEN, MASK)[0, 1].item() == 0.0
        assert truncate(bad, 0.0, "tis", 5.0, 0.5) == [0.0, 1.0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_token_without_a_finite_ratio_does_not_drop_its_sequence(bad: float) -> None:
    assert truncate(0.1, bad, "seq-mask-tis", 1.06, 0.9) == pytest.approx([math.exp(0.1), 0.0])


def test_the_three_truncations() -> None:
    low, high = math.log(0.4), math.log(6.0)
    assert truncate(low, high, "tis", 5.0, None) == pytest.approx([0.4, 5.0])
    assert truncate(low, high, "tis", 5.0, 0.5) == pytest.approx([0.5, 5.0])
    assert truncate(low, high, "icepop", 5.0, 0.5) == [0.0, 0.0]
    assert truncate(0.3, high, "icepop", 5.0, 0.5) == pytest.approx([math.exp(0.3), 0.0])
    assert truncate(0.3, -0.3, "seq-mask-tis", 1.002, 0.999) == pytest.approx([math.exp(0.3), math.exp(-0.3)])
    assert truncate(0.3, -0.2, "seq-mask-tis", 1.002, 0.999) == [0.0, 0.0]


@pytest.mark.parametrize(
    ("kind", "lower", "outside"),
    [("tis", None, [0, 0, 0, 0, 1]), ("tis", 0.5, [1, 1, 0, 0, 1]), ("icepop", 0.5, [1, 1, 0, 0, 1])],
)
def test_a_weight_on_a_bound_is_within(kind: Any, lower: float | None, outside: list[int]) -> None:
    weights = torch.tensor([[0.0, 0.25, 0.5, 2.0, 2.5]])
    got = truncate_weights(weights, weights, weights, weights, kind=kind, upper=2.0, lower=lower)
    assert got.out_of_bounds is not None and got.out_of_bounds.tolist() == [outside]


def test_sequences_are_dropped_one_by_one_by_the_mean_of_their_trained_tokens() -> None:
    logprobs = torch.tensor([[9.0, 0.3, -0.3], [0.0, 0.3, 0.3], [0.0, 0.0, -0.4]])
    mask = torch.tensor([[0.0, 1.0, 1.0], [0.0, 1.0, 1.0], [0.0, 0.0, 1.0]])
    generation = torch.zeros(3, 3)
    weights = importance_weights(logprobs, generation, mask)
    got = truncate_weights(weights, logprobs, generation, mask, kind="seq-mask-tis", upper=1.2, lower=0.8)
    assert got.out_of_bounds is not None and got.out_of_bounds.tolist() == [[0.0], [1.0], [1.0]]
    assert got.weights[1:].abs().sum() == 0 and torch.equal(got.weights[0], weights[0])


@given(a=st.floats(-4, 4), b=st.floats(-4, 4), upper=st.floats(1.0, 5.0), lower=st.floats(0.1, 1.0))
def test_truncated_weights_are_bounded_or_dropped(a: float, b: float, upper: float, lower: float) -> None:
    assert all(lower * 0.999 <= w <= upper * 1.001 for w in truncate(a, b, "tis", upper, lower))
    assert all(w == 0 or lower * 0.999 <= w <= upper * 1.001 for w in truncate(a, b, "icepop", upper, lower))


def test_lower_bounds_and_types_are_checked() -> None:
    with pytest.raises(ValueError, match="lower bound"):
        truncate(0.0, 0.0, "icepop", 5.0, None)
    with pytest.raises(ValueError, match="tis, icepop or seq-mask-tis"):
        truncate(0.0, 0.0, "nope", 5.0, 0.1)


def test_the_error_of_a_sequence_is_the_mean_over_its_tokens() -> None:
    p = torch.tensor([[0.0, -1.0, -1.0], [0.0, -1.0, -1.0], [0.0, -1.0, math.inf], [0.0, -1.0, math.nan]])
    g = torch.tensor([[0.0, -1.1, -0.9], [0.0, -3.0, -1.0], [0.0, -1.0, -1.0], [0.0, -1.0, -1.0]])
    mask = torch.tensor([[0.0, 1.0, 1.0]] * 4)
    error = sequence_logprob_error(p, g, mask).tolist()
    assert error[:2] == pytest.approx([math.exp(0.1), (math.exp(2.0) + 1) / 2])
    assert error[2:] == [math.inf, math.inf]
