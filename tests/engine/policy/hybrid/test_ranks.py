"""Every parallel layout of a hybrid gives what one process gives, checkpoints between layouts included."""

from __future__ import annotations

import re

import pytest
import torch
from safetensors.torch import load_file

from tests.engine.policy.batches import grouped_batch
from tests.engine.policy.hybrid.ranks import (
    FOUR,
    FSDP,
    PATTERNS,
    RESHARDED,
    TWO,
    fsdp_steps,
    policy_of,
    preference_steps,
    scenarios,
    steps,
)
from tests.engine.policy.ranks import run_ranks
from tests.models.hybrid_twins import write_hybrid


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("hybrids")
    for twin, pattern in PATTERNS.items():
        # Five layers, so that stages are unequal, and an odd vocabulary for the padding.
        write_hybrid(twin, root / twin, pattern=pattern, initializer_range=0.1, vocab_size=201)
    return {twin: root / twin for twin in PATTERNS}


@pytest.fixture(scope="module")
def expected(folders):
    """Twin → what one process finds, and its tensors."""
    results = {}
    for twin, folder in folders.items():
        found, tensors, _ = steps(folder, {})
        results[twin] = found, tensors
    return results


@pytest.fixture(scope="module")
def preferring(folders):
    """What one process finds of preferences."""
    return preference_steps(folders["mtp"], {})


def run(ranks, folders, out):
    """What every rank found, and where the first one left its tensors."""
    first, *others = run_ranks(ranks, out, folders, scenarios)
    assert all(other == first for other in others)
    return first, out


@pytest.fixture(scope="module")
def two_ranks(folders, tmp_path_factory):
    return run(2, folders, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def four_ranks(folders, tmp_path_factory):
    return run(4, folders, tmp_path_factory.mktemp("four"))


def assert_same_metrics(found, expected):
    for name in ("loss", "grad_norm", "entropy", "num_valid_tokens", "token_mult_prob_error"):
        assert found[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name
    for name in filter(re.compile(r"mtp_\d_(loss|acceptance_rate)").fullmatch, expected):
        assert found[name] == pytest.approx(expected[name], rel=1e-4), name
    # Two of a token's experts that score alike may fall otherwise.
    for name in {"router_replay_share", "router_replay_mismatch"} & set(expected):
        assert found[name] == pytest.approx(expected[name], rel=2e-2), name


def assert_same(case, ranks, expected):
    found, tensors = ranks[0][case], load_file(ranks[1] / f"{case}.safetensors")
    one, theirs = expected
    for mine, alone in zip(found["metrics"], one["metrics"], strict=True):
        assert_same_metrics(mine, alone)
    torch.testing.assert_close(torch.tensor(found["before"]), torch.tensor(one["before"]), atol=2e-5, rtol=0)
    torch.testing.assert_close(torch.tensor(found["after"]), torch.tensor(one["after"]), atol=2e-3, rtol=0)
    assert set(tensors) == set(theirs)
    tolerance = 1e-5 * one["metrics"][0]["grad_norm"]
    for name, tensor in theirs.items():
        torch.testing.assert_close(tensors[name], tensor, atol=tolerance, rtol=1e-3, msg=name)


@pytest.mark.parametrize(("twin", "layout"), [(twin, layout) for twin in TWO for layout in TWO[twin]])
def test_two_ranks_train_like_one(twin, layout, two_ranks, expected):
    assert ("router_replay_mismatch" in expected[twin][0]["metrics"][1]) == (twin != "dense")
    assert_same(f"{twin}: {layout}", two_ranks, expected[twin])


@pytest.mark.parametrize("twin", [twin for twin, precision in FSDP if precision == "float32"])
def test_two_ranks_of_the_dtensor_policy_train_like_one(twin, two_ranks, folders):
    found, tensors, _ = fsdp_steps(folders[twin], "float32")
    assert_same(f"{twin}: FSDP2, float32", two_ranks, (found, tensors))


def test_in_bfloat16_exact_parameters_of_the_dtensor_policy_have_the_gradients_of_all_ranks(two_ranks, folders):
    """Which FSDP2 does not reduce."""
    case = "latent: FSDP2, bfloat16"
    found, tensors = two_ranks[0][case], load_file(two_ranks[1] / f"{case}.safetensors")
    alone, expected, _ = fsdp_steps(folders["latent"], "bfloat16")
    for mine, theirs in zip(found["metrics"], alone["metrics"], strict=True):
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=0.05)
    exact = [name for name in expected if name.endswith(("A_log", ".D", "dt_bias"))]
    assert len(exact) == 6
    for name in exact:
        difference = (tensors[name] - expected[name]).norm() / expected[name].norm()
        assert float(difference) < 0.1, name


@pytest.mark.parametrize(("twin", "precision"), FSDP)
def test_a_checkpoint_of_the_dtensor_policy_continues(twin, precision, two_ranks):
    went_on, loaded = two_ranks[0][f"{twin}: FSDP2, {precision}, third"]
    assert_same_metrics(loaded, went_on)


@pytest.mark.parametrize(("twin", "saved", "loaded"), RESHARDED)
def test_a_checkpoint_continues_in_any_layout(twin, saved, loaded, two_ranks):
    """With the step of the ranks that saved it: those of one process have moved by what rounding does to Adam."""
    found, _ = two_ranks
    assert_same_metrics(found[f"{twin}: {saved} → {loaded}"], found[f"{twin}: {saved} →"])


@pytest.mark.parametrize("layout", TWO["mtp"])
def test_preferences_and_predictions_are_trained_on_two_ranks_as_on_one(layout, two_ranks, preferring):
    """A pair stays whole, wherever the tokens that its rows read ahead are."""
    for mine, alone in zip(two_ranks[0][f"{layout}, preferences"], preferring, strict=True):
        for name in ("loss", "preference_loss", "rewards_margin", "grad_norm", "mtp_1_loss", "mtp_2_loss"):
            assert mine[name] == pytest.approx(alone[name], rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("layout", ["pipeline", "expert, tensor, sequence"])
def test_detached_blocks_are_clipped_by_themselves_on_any_rank(layout, two_ranks, folders):
    """Of two stages one alone has blocks, and the other one takes part in the norm."""
    found, alone = two_ranks[0][f"{layout}, detached"], policy_of(folders["mtp"], {"mtp_detach_heads": True})
    expected = alone.train_step(grouped_batch(0))
    assert_same_metrics(found, expected)
    assert found["mtp_grad_norm"] == pytest.approx(expected["mtp_grad_norm"], rel=1e-4)


@pytest.mark.parametrize("layout", ["pipeline", "expert, tensor, sequence"])
def test_float32_parameters_reach_every_rank_in_float32(layout, two_ranks):
    dtypes = two_ranks[0][f"{layout} in bfloat16"]
    exact = {name for name, dtype in dtypes.items() if dtype == "torch.float32"}
    assert exact == {
        name for name in dtypes if name.endswith(("A_log", "mixer.D", "dt_bias", "e_score_correction_bias"))
    }
    assert set(dtypes.values()) == {"torch.float32", "torch.bfloat16"}


@pytest.mark.slow
@pytest.mark.parametrize(("twin", "layout"), [(twin, layout) for twin in FOUR for layout in FOUR[twin]])
def test_four_ranks_train_like_one(twin, layout, four_ranks, expected):
    assert_same(f"{twin}: {layout}", four_ranks, expected[twin])
