"""Adapters on two ranks (gloo, or two GPUs) are those of one: what they compute, learn, save and load."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from tests.engine.policy.lora_ranks import HYBRID, LAYOUTS, PEFT, SAVED, scenarios
from tests.engine.policy.ranks import run_ranks, two_steps
from tests.models import hybrid_twins
from tests.models.checkpoints import write_checkpoint

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.device_count() < 2, reason="needs two GPUs, or none for gloo"
    ),
]


@pytest.fixture(scope="module")
def found_and_expected(tmp_path_factory):
    root = tmp_path_factory.mktemp("lora_ranks")
    write_checkpoint("qwen3", root / "qwen3", initializer_range=0.1, num_hidden_layers=2, vocab_size=201)
    hybrid_twins.write_hybrid("dense", root / "hybrid", vocab_size=201)
    folders = {name: root / name for name in ("qwen3", "hybrid")}
    ranks = run_ranks(2, root, folders, scenarios)
    assert all(rank == ranks[0] for rank in ranks)
    one = {}
    for name, folder in folders.items():
        one[name], policy = two_steps(folder, PEFT)
        policy.save_adapter(root / f"one {name}", str(folder), "")
    return ranks[0], one, root


@pytest.mark.parametrize("layout", [*LAYOUTS, *(f"hybrid, {layout}" for layout in HYBRID)])
def test_two_ranks_train_adapters_like_one(layout, found_and_expected):
    found, both, root = found_and_expected
    model = "hybrid" if layout.startswith("hybrid") else "qwen3"
    one = both[model]
    result = found[layout]
    for mine, theirs in zip(result["metrics"], one["metrics"], strict=True):
        for name in ("loss", "grad_norm", "entropy", "num_valid_tokens"):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-6), name
    torch.testing.assert_close(torch.tensor(result["before"]), torch.tensor(one["before"]), atol=2e-5, rtol=0)
    torch.testing.assert_close(torch.tensor(result["after"]), torch.tensor(one["after"]), atol=2e-3, rtol=0)
    saved, expected = (load_file(root / name / "adapter_model.safetensors") for name in (layout, f"one {model}"))
    assert saved.keys() == expected.keys()
    # Of B, Adam's first steps are lr times the gradient's sign, which rounding may turn where it is all but 0.
    for name in expected:
        close = (saved[name] - expected[name]).abs() < 2e-3
        assert close.float().mean() > 0.99, name


def test_a_training_checkpoint_of_adapters_loads_in_another_layout(found_and_expected):
    found, _, _ = found_and_expected
    after, expected = (torch.tensor(found[name]["after"]) for name in ("resharded", SAVED))
    torch.testing.assert_close(after, expected, atol=2e-5, rtol=0)


def test_ranks_that_drew_different_amounts_go_on_with_the_dropout_that_each_of_them_would_have_had(found_and_expected):
    found, _, _ = found_and_expected
    assert found["dropout"]["states"] == [0, 1]  # else this shows nothing
    assert found["dropout"]["resumed"] == found["dropout"]["unbroken"]
