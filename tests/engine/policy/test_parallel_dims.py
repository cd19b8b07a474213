"""Every parallel layout gives what one process gives: losses, gradient norms, logprobs, weights, checkpoints."""

from __future__ import annotations

import pytest
import torch

from nemotron_steps.config.schema.policy import MegatronConfig
from nemotron_steps.engine.policy.parallel_dims import ParallelDims
from nemotron_steps.models.architecture import Architecture
from tests.engine.policy.batches import grouped_batch
from tests.engine.policy.ranks import (
    BALANCED,
    DTENSOR,
    LAYOUTS,
    RATE,
    RESHARDED,
    TRUNCATED,
    run_ranks,
    scenarios,
    two_steps,
)
from tests.engine.policy.test_snapshots import content
from tests.models.checkpoints import write_checkpoint

CASES = [(model, layout) for model, layouts in LAYOUTS.items() for layout in layouts]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("parallel")
    for model in LAYOUTS:
        # An even number of layers for the pipeline, an odd vocabulary for the padding.
        write_checkpoint(model, root / model, initializer_range=0.1, num_hidden_layers=4, vocab_size=201)
    return {model: root / model for model in LAYOUTS}


@pytest.fixture(scope="module")
def ranks_folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def found(folders, ranks_folder):
    first, second = run_ranks(2, ranks_folder, folders, scenarios)
    assert first == second
    return first


@pytest.fixture(scope="module")
def expected(folders):
    results = {}
    for model, folder in folders.items():
        results[model], policy = two_steps(folder, {})
        results[f"{model} third step"] = policy.train_step(grouped_batch(2))
    return results


@pytest.mark.parametrize("layout", BALANCED)
def test_two_ranks_balance_experts_like_one(layout, found, folders):
    one, _ = two_steps(folders["qwen3_moe"], RATE)
    biases = [name for name in one["weights"] if name.endswith("e_score_correction_bias")]
    result = found[f"qwen3_moe: {layout}"]
    assert biases and {n: result["weights"][n] for n in biases} == pytest.approx({n: one["weights"][n] for n in biases})
    for mine, theirs in zip(result["metrics"], one["metrics"], strict=True):
        _assert_same_metrics(mine, theirs)


def _assert_same_metrics(found, expected):
    for name in ("loss", "grad_norm", "entropy", "num_valid_tokens", "probs_ratio_max", "token_mult_prob_error"):
        assert found[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name


DTENSOR_CASES = [(model, layout) for model in ("qwen3", "qwen2_tied") for layout in DTENSOR]


@pytest.mark.parametrize(("model", "layout"), [*CASES, ("qwen3_moe", "expert, packed"), *DTENSOR_CASES])
def test_two_ranks_train_like_one(model, layout, found, expected):
    result, one = found[f"{model}: {layout}"], expected[model]
    for mine, theirs in zip(result["metrics"], one["metrics"], strict=True):
        _assert_same_metrics(mine, theirs)
    torch.testing.assert_close(torch.tensor(result["before"]), torch.tensor(one["before"]), atol=2e-5, rtol=0)
    torch.testing.assert_close(torch.tensor(result["after"]), torch.tensor(one["after"]), atol=2e-3, rtol=0)
    assert set(result["weights"]) == set(one["weights"])
    for name, total in result["weights"].items():
        assert total == pytest.approx(one["weights"][name], abs=5e-3), name


@pytest.mark.parametrize("layout", TRUNCATED)
def test_two_ranks_keep_the_same_tokens_of_a_truncated_distribution_as_one(layout, found, folders):
    result, (one, _) = found[f"qwen3: {layout}, truncated"], two_steps(folders["qwen3"], {}, truncated=True)
    for mine, theirs in zip(result["metrics"], one["metrics"], strict=True):
        _assert_same_metrics(mine, theirs)
        assert mine["outside_truncation"] == pytest.approx(theirs["outside_truncation"])
    before = torch.tensor(one["before"])
    torch.testing.assert_close(torch.tensor(result["before"]), before, atol=2e-5, rtol=0)
    outside = (before.isneginf() & (grouped_batch(0).token_mask > 0)).float().mean()
    assert 0.01 < outside < 0.3 and 0.02 < one["metrics"][0]["outside_truncation"] < 0.5


@pytest.mark.parametrize(("model", "saved", "loaded"), RESHARDED)
def test_a_checkpoint_continues_in_any_layout(model, saved, loaded, found, expected):
    _assert_same_metrics(found[f"{model}: {saved} → {loaded}"], expected[f"{model} third step"])


@pytest.mark.parametrize("model", ["qwen3", "qwen2_tied"])
def test_dtensor_checkpoints_continue_in_any_layout_and_in_megatron(model, found, expected):
    data, tensor = DTENSOR
    for before, after in ((data, tensor), (tensor, data)):
        _assert_same_metrics(found[f"{model}: {before} → {after}"], expected[f"{model} third step"])
    opened = torch.tensor(found[f"{model}: dtensor as megatron"])
    torch.testing.assert_close(opened, torch.tensor(found[f"{model}: {tensor}"]["after"]), atol=2e-5, rtol=0)


@pytest.mark.parametrize(("tensor", "cut"), [(1, False), (2, True)])
def test_tokens_are_cut_only_where_there_are_tensor_ranks_to_cut_them_for(tensor, cut, folders):
    config = MegatronConfig(tensor_model_parallel_size=tensor, sequence_parallel=True)
    dims = ParallelDims.from_config(config, Architecture.from_folder(folders["qwen3"]))
    assert dims == ParallelDims(tensor=tensor, sequence_parallel=cut)


def test_groups_of_a_layout_that_is_left_are_let_go(found):
    data, tensor, *again = found["groups"]
    assert again == [data, tensor]


def test_nan_on_one_rank_stops_all(found):
    assert found["nan refused"] is True


@pytest.mark.parametrize("layout", ["tensor", "narrow", "dtensor"])
def test_checkpoints_written_while_the_ranks_train_on_are_those_of_their_step(layout, found, ranks_folder):
    saved, behind = (content(ranks_folder / f"{layout} {how}") for how in ("saved", "behind"))
    assert len(saved) > 3 and saved == behind
