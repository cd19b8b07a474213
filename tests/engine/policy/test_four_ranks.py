"""Two kinds of parallelism at once, on four ranks (gloo, or four GPUs), give what one process gives."""

from __future__ import annotations

import pytest
import torch

from tests.conditioning import Conditioned
from tests.engine.policy.batches import grouped_batch
from tests.engine.policy.ranks import FOUR, run_ranks, scenarios_of_four, two_steps
from tests.models.checkpoints import write_checkpoint

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.device_count() < 4, reason="needs four GPUs, or none for gloo"
    ),
]
CASES = [(model, layout) for model, layouts in FOUR.items() for layout in layouts]


@pytest.fixture(scope="module")
def found_and_expected(tmp_path_factory):
    root = tmp_path_factory.mktemp("four")
    for model in FOUR:
        write_checkpoint(model, root / model, initializer_range=0.1, num_hidden_layers=4, vocab_size=201)
    folders = {model: root / model for model in FOUR}
    ranks = run_ranks(4, root, folders, scenarios_of_four)
    assert all(rank == ranks[0] for rank in ranks)
    batches = grouped_batch(0), grouped_batch(1)
    return ranks[0], {
        model: Conditioned(lambda folder, *batches: two_steps(folder, {}, batches)[0], folder, *batches)
        for model, folder in folders.items()
    }


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_four_ranks_train_like_one(model, layout, found_and_expected):
    found, expected = found_and_expected
    expected[model].check(found[f"{model}: {layout}"])
