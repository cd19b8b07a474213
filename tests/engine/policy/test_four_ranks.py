"""Two kinds of parallelism at once, on four ranks (gloo, or four GPUs), give what one process gives."""

from __future__ import annotations

import pytest
import torch

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
    return ranks[0], {model: two_steps(folder, {})[0] for model, folder in folders.items()}


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_four_ranks_train_like_one(model, layout, found_and_expected):
    found, expected = found_and_expected
    result, one = found[f"{model}: {layout}"], expected[model]
    for mine, theirs in zip(result["metrics"], one["metrics"], strict=True):
        for name in ("loss", "grad_norm", "entropy", "num_valid_tokens", "token_mult_prob_error"):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-6), name
    torch.testing.assert_close(torch.tensor(result["before"]), torch.tensor(one["before"]), atol=2e-5, rtol=0)
    torch.testing.assert_close(torch.tensor(result["after"]), torch.tensor(one["after"]), atol=2e-3, rtol=0)
