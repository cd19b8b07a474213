"""Every parallel layout gives what one process gives: losses, gradient norms, logprobs, weights, checkpoints."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from nemotron_steps.config.schema.policy import MegatronConfig
from nemotron_steps.engine.policy.distributed.parallel_dims import ParallelDims
from nemotron_steps.models.architecture import Architecture
from tests.conditioning import Conditioned
from tests.engine.policy.batches import grouped_batch
from tests.engine.policy.ranks import (
    BALANCED,
    DTENSOR,
    FOUR,
    LAYOUTS,
    RATE,
    RESHARDED,
    TRUNCATED,
    run_ranks,
    scenarios,
    scenarios_of_four,
    two_steps,
)
from tests.engine.policy.test_checkpoint import content
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


def three_steps(megatron, folder, *batches, **changes):
    found, policy = two_steps(folder, megatron, batches[:2], **changes)
    return found | {"third": policy.train_step(batches[2])}


@pytest.fixture(scope="module")
def expected(folders):
    """By model, of one process: balanced, and of a truncated distribution, as well."""

    def of(model, megatron=None, **changes):
        batches = [grouped_batch(seed) for seed in range(3)]
        return Conditioned(partial(three_steps, megatron or {}, **changes), folders[model], *batches)

    return {model: of(model) for model in folders} | {
        "balanced": of("qwen3_moe", RATE),
        "truncated": of("qwen3", truncated=True),
    }


def check(result, expected):
    for part, found in result.items():
        expected[part].check(found)


@pytest.mark.parametrize("layout", BALANCED)
def test_two_ranks_balance_experts_like_one(layout, found, expected):
    one = expected["balanced"]
    assert any(name.endswith("e_score_correction_bias") for name in one.value["weights"])
    check(found[f"qwen3_moe: {layout}"], one)


DTENSOR_CASES = [(model, layout) for model in ("qwen3", "qwen2_tied") for layout in DTENSOR]


@pytest.mark.parametrize(("model", "layout"), [*CASES, ("qwen3_moe", "expert, packed"), *DTENSOR_CASES])
def test_two_ranks_train_like_one(model, layout, found, expected):
    check(found[f"{model}: {layout}"], expected[model])


@pytest.mark.parametrize("layout", TRUNCATED)
def test_two_ranks_keep_the_same_tokens_of_a_truncated_distribution_as_one(layout, found, expected):
    one = expected["truncated"]
    check(found[f"qwen3: {layout}, truncated"], one)
    outside = torch.tensor(one.value["before"]).isneginf() & (grouped_batch(0).token_mask > 0)
    assert 0.01 < outside.float().mean() < 0.3 and 0.02 < one.value["metrics"][0]["outside_truncation"] < 0.5


@pytest.mark.parametrize(("model", "saved", "loaded"), RESHARDED)
def test_a_checkpoint_continues_in_any_layout(model, saved, loaded, found, expected):
    expected[model]["third"].check(found[f"{model}: {saved} → {loaded}"])


@pytest.mark.parametrize("model", ["qwen3", "qwen2_tied"])
def test_dtensor_checkpoints_continue_in_any_layout_and_in_megatron(model, found, expected):
    data, tensor = DTENSOR
    for before, after in ((data, tensor), (tensor, data)):
        expected[model]["third"].check(found[f"{model}: {before} → {after}"])
    expected[model]["after"].check(found[f"{model}: dtensor as megatron"])


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


FOUR_CASES = [(model, layout) for model, layouts in FOUR.items() for layout in layouts]


@pytest.fixture(scope="module")
def four(tmp_path_factory):
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


@pytest.mark.slow
@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.device_count() < 4, reason="needs four GPUs, or none for gloo"
)
@pytest.mark.parametrize(("model", "layout"), FOUR_CASES)
def test_four_ranks_train_like_one(model, layout, four):
    found, expected = four
    expected[model].check(found[f"{model}: {layout}"])
