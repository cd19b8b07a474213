"""None"""

from collections.abc import Callable

import pytest
import torch

from nemotron_steps.config.schema.grpo import LossFnConfig
from nemotron_steps.engine.batching import select_rows, token_budget_micro_batches
from nemotron_steps.engine.losses.loss import count_normalizers
from nemotron_steps.engine.losses.policy_gradient import PolicyGradientLoss
from nemotron_steps.engine.packing import ALGORITHMS, first_fit_decreasing, modified_first_fit_decreasing, pack
from tests.engine.engine_samples import random_batch


def test_it_beats_ffd_on_the_textbook_case() -> None:
    sizes = [51] * 6 + [27] * 6 + [26] * 6 + [23] * 12
    assert len(first_fit_decreasing(sizes, 100)) == 11
    assert len(modified_first_fit_decreasing(sizes, 100)) == 10


@pytest.mark.parametrize("plan", [modified_first_fit_decreasing, token_budget_micro_batches])
def test_the_loss_and_gradient_do_not_depend_on_which_sequences_share_a_row(
    plan: Callable[..., list[list[int]]],
) -> None:
    loss_fn = PolicyGradientLoss(LossFnConfig(reference_policy_kl_penalty=0.1))
    batch, lp = random_batch(rows=8, width=12, seed=4)
    normalizers = count_normalizers(batch)
    whole, _ = loss_fn(lp, batch, normalizers)
    whole.backward()
    source = lp.detach().clone().requires_grad_()
    lengths = batch.lengths.tolist()
    total = 0.0
    for rows in plan(lengths, 24):
        width = max(lengths[row] for row in rows)
        loss, _ = loss_fn(source[rows, :width], select_rows(batch, rows, width=width), normalizers)
        loss.backward()
        total += loss.item()
    assert total == pytest.approx(whole.item(), rel=1e-5)
    torch.testing.assert_close(source.grad, lp.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_packs_every_item_once_and_no_bin_too_full(algorithm):
    sizes = [(7 * i) % 100 + 1 for i in range(50)]
    bins = pack(algorithm, sizes, 100)
    assert sorted(item for chosen in bins for item in chosen) == list(range(50))
    assert max(sum(sizes[item] for item in chosen) for chosen in bins) <= 100


@pytest.mark.parametrize(
    ("sizes", "bins"),
    [
        ([50, 50], [[0, 1]]),  # not above half: medium
        ([60, 40, 10], [[0, 1], [2]]),
        ([60, 55, 40, 45, 5], [[0, 2], [1, 3], [4]]),  # the fullest bin chooses first
        ([55, 26, 19, 20], [[0, 1, 2], [3]]),  # the smallest, with the largest beside it
        ([51, 34, 34, 15, 15], [[0, 1, 3], [2, 4]]),
        ([60, 30, 22, 18], [[0, 2, 3], [1]]),  # no more bins than first fit decreasing, and fuller ones
        ([], []),
    ],
)
def test_mffd_fills_bins_as_it_was_published(sizes, bins):
    assert [sorted(found) for found in modified_first_fit_decreasing(sizes, 100)] == bins
