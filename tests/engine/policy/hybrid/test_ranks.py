"""Every parallel layout of a hybrid gives what one process gives, checkpoints between layouts included."""

from __future__ import annotations

from functools import partial

import pytest
from safetensors.torch import load_file

from tests.conditioning import Conditioned
from tests.engine.policy.batches import grouped_batch, paired
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
    two_batches,
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


def alone(compute, folder):
    """What one process finds: figures, tensors, and the figures of a third step."""

    def three(folder, *batches):
        found, tensors, policy = compute(folder, batches=batches[:2])
        return {**found, "tensors": tensors, "third": policy.train_step(batches[2])}

    return Conditioned(three, folder, *two_batches(), grouped_batch(2))


@pytest.fixture(scope="module")
def expected(folders):
    """Twin → what one process finds."""
    return {twin: alone(partial(steps, megatron={}), folder) for twin, folder in folders.items()}


@pytest.fixture(scope="module")
def preferring(folders):
    """What one process finds of preferences."""
    return Conditioned(
        lambda folder, *batches: preference_steps(folder, {}, batches), folders["mtp"], *map(paired, two_batches())
    )


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


def assert_same(case, ranks, expected):
    for part, found in {**ranks[0][case], "tensors": load_file(ranks[1] / f"{case}.safetensors")}.items():
        expected[part].check(found)


@pytest.mark.parametrize(("twin", "layout"), [(twin, layout) for twin in TWO for layout in TWO[twin]])
def test_two_ranks_train_like_one(twin, layout, two_ranks, expected):
    assert ("router_replay_mismatch" in expected[twin].value["metrics"][1]) == (twin != "dense")
    assert_same(f"{twin}: {layout}", two_ranks, expected[twin])


@pytest.mark.parametrize("twin", [twin for twin, precision in FSDP if precision == "float32"])
def test_two_ranks_of_the_dtensor_policy_train_like_one(twin, two_ranks, folders):
    assert_same(f"{twin}: FSDP2, float32", two_ranks, alone(partial(fsdp_steps, precision="float32"), folders[twin]))


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
    assert loaded == went_on


@pytest.mark.parametrize(("twin", "saved", "loaded"), RESHARDED)
def test_a_checkpoint_continues_in_any_layout(twin, saved, loaded, two_ranks, expected):
    for case in (f"{twin}: {saved} → {loaded}", f"{twin}: {saved} →"):
        expected[twin]["third"].check(two_ranks[0][case])


@pytest.mark.parametrize("layout", TWO["mtp"])
def test_preferences_and_predictions_are_trained_on_two_ranks_as_on_one(layout, two_ranks, preferring):
    """A pair stays whole, wherever the tokens that its rows read ahead are."""
    preferring.check(two_ranks[0][f"{layout}, preferences"])


@pytest.fixture(scope="module")
def detached(folders):
    """What one process finds where blocks are detached."""

    def step(folder, batch):
        return policy_of(folder, {"mtp_detach_heads": True}).train_step(batch)

    return Conditioned(step, folders["mtp"], grouped_batch(0))


@pytest.mark.parametrize("layout", ["pipeline", "expert, tensor, sequence"])
def test_detached_blocks_are_clipped_by_themselves_on_any_rank(layout, two_ranks, detached):
    """Of two stages one alone has blocks, and the other one takes part in the norm."""
    detached.check(two_ranks[0][f"{layout}, detached"])


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
