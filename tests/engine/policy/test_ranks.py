"""Every subject gives in every parallel layout what it gives one process: figures, gradients, weights, checkpoints."""

import functools

import pytest
import torch
from safetensors.torch import load_file

from nemotron_steps.config.schema.policy import MegatronConfig
from nemotron_steps.engine.policy.distributed.context_parallel import columns
from nemotron_steps.engine.policy.distributed.parallel_dims import ParallelDims
from nemotron_steps.engine.policy.megatron import MegatronPolicy
from nemotron_steps.models.architecture import Architecture
from nemotron_steps.models.huggingface import load_hf_weights
from nemotron_steps.models.megatron_checkpoint import convert_megatron_to_hf
from tests.conditioning import Conditioned
from tests.engine.policy.batches import grouped_batch, policy_config, rl_loss
from tests.engine.policy.ranks import (
    CASES,
    RESHARDED,
    alone,
    batches_of,
    gradients,
    policy_of,
    run_ranks,
    scenarios,
    write_subject,
)
from tests.engine.policy.test_checkpoint import content

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    root = tmp_path_factory.mktemp("subjects")

    @functools.cache
    def write(subject):
        write_subject(subject, root / subject)
        return root / subject

    return write


@pytest.fixture(scope="module")
def one(folder_of):
    """Subject → what one process finds."""

    @functools.cache
    def train(subject):
        return Conditioned(functools.partial(alone, subject), folder_of(subject), *batches_of(subject))

    return train


@pytest.fixture(scope="module")
def found_by(folder_of, tmp_path_factory):
    """Number of ranks → (what they found, the folder that they wrote to)."""

    @functools.cache
    def run(ranks):
        if torch.cuda.is_available() and torch.cuda.device_count() < ranks:
            pytest.skip("needs as many GPUs, or none for gloo")
        out = tmp_path_factory.mktemp(f"ranks{ranks}")
        first, *others = run_ranks(ranks, out, {subject: folder_of(subject) for subject in CASES[ranks]}, scenarios)
        assert all(other == first for other in others)
        return first, out

    return run


def marked(ranks, *case):
    marks = [pytest.mark.slow] if ranks > 2 else []
    return pytest.param(ranks, *case, marks=marks, id=f"{ranks} ranks, {', '.join(case)}")


@pytest.mark.parametrize(
    ("ranks", "subject", "layout"),
    [marked(ranks, name, each) for ranks in CASES for name in CASES[ranks] for each in CASES[ranks][name]],
)
def test_ranks_train_like_one(ranks, subject, layout, one, found_by):
    found, out = found_by(ranks)
    case = f"{subject}: {layout}"
    tensors, expected = load_file(out / f"{case}.safetensors"), one(subject)
    for part, theirs in {**found[case], "tensors": tensors}.items():
        expected[part].check(theirs)
    if subject.startswith("adapters"):
        assert len(load_file(out / f"{case} adapter" / "adapter_model.safetensors")) % 2 == 0
    if subject == "truncated":
        outside = torch.tensor(expected.value["before"]).isneginf() & (grouped_batch(0).token_mask > 0)
        assert 0.01 < outside.float().mean() < 0.3
        assert 0.02 < expected.value["metrics"][0]["outside_truncation"] < 0.5


@pytest.mark.parametrize(("ranks", "subject", "saved", "loaded"), [marked(*case) for case in RESHARDED])
def test_a_checkpoint_continues_in_any_layout(ranks, subject, saved, loaded, one, found_by, tmp_path):
    found, out = found_by(ranks)
    one(subject)["third"].check(found[f"{subject}: {saved} → {loaded}"])
    if subject == "mixture":  # Qwen's checkpoints have no place for the biases that balance it
        return
    convert_megatron_to_hf(out / f"{subject}: {saved} as megatron", tmp_path / "hf")
    written = load_file(out / f"{subject}: {saved}.safetensors")
    exported = load_hf_weights(tmp_path / "hf")
    assert exported.keys() <= written.keys() | {name for name in exported if name.startswith("mtp.")}
    assert all(torch.equal(tensor, written[name]) for name, tensor in exported.items() if name in written)


def test_a_model_of_the_dtensor_policy_opens_in_megatrons(found_by, one):
    _, out = found_by(2)
    opened = MegatronPolicy(policy_config(), out / "dtensor: tensor as megatron", rl_loss())
    one("dtensor")["after"].check(opened.logprobs(grouped_batch(0)).tolist())


def test_in_bfloat16_exact_parameters_reach_every_rank_and_have_the_gradients_of_all(found_by, folder_of):
    found, _ = found_by(2)
    exact = {name for name, dtype in found["dtypes"].items() if dtype == "torch.float32"}
    kinds = ("A_log", "mixer.D", "dt_bias", "e_score_correction_bias")
    assert exact == {name for name in found["dtypes"] if name.endswith(kinds)} != set(found["dtypes"])
    policy = policy_of(folder_of("dtensor, latent"), "dtensor, latent", {}, precision="bfloat16")
    policy.train_step(grouped_batch(0))
    mine = {name: torch.tensor(values) for name, values in found["exact"].items()}  # which FSDP2 does not reduce
    assert len(mine) == 6
    for name, expected in gradients(policy):
        if name in mine:
            assert float((mine[name] - expected).norm() / expected.norm()) < 0.1, name


def test_ranks_that_drew_different_amounts_go_on_with_the_dropout_that_each_would_have_had(found_by):
    assert found_by(2)[0]["dropout"] == {"drawn": [0, 1], "same": True}


def test_nan_on_one_rank_stops_all_and_groups_of_a_layout_that_is_left_are_let_go(found_by):
    found, _ = found_by(2)
    assert found["nan refused"] is True
    data, tensor, *again = found["groups"]
    assert again == [data, tensor]


@pytest.mark.parametrize("layout", ["tensor", "narrow", "dtensor"])
def test_checkpoints_written_while_the_ranks_train_on_are_those_of_their_step(layout, found_by):
    saved, behind = (content(found_by(2)[1] / f"{layout} {how}") for how in ("saved", "behind"))
    assert len(saved) > 3 and saved == behind


@pytest.mark.parametrize(("tensor", "cut"), [(1, False), (2, True)])
def test_tokens_are_cut_only_where_there_are_tensor_ranks_to_cut_them_for(tensor, cut, folder_of):
    config = MegatronConfig(tensor_model_parallel_size=tensor, sequence_parallel=True)
    dims = ParallelDims.from_config(config, Architecture.from_folder(folder_of("qwen3")))
    assert dims == ParallelDims(tensor=tensor, sequence_parallel=cut)


@pytest.mark.parametrize(
    ("heads", "shared", "width", "ranks"), [(4, 1, 16, 2), (4, 1, 16, 4), (8, 2, 5, 4), (32, 2, 128, 8)]
)
def test_each_rank_gets_its_query_heads_and_their_key_and_value(heads, shared, width, ranks):
    group = [("q", number) for number in range(heads // shared)]
    rows = [
        (kind, key, number, place)
        for key in range(shared)
        for kind, number in [*group, ("k", 0), ("v", 0)]
        for place in range(width)
    ]
    cut = len(rows) // ranks
    for rank in range(ranks):
        got = []
        for source in range(ranks):
            held = rows[source * cut : (source + 1) * cut]
            got += [
                row
                for first, after in columns(heads, shared, width, ranks, source).sent[rank]
                for row in held[first:after]
            ]
        each, key = heads // ranks, rank * shared // ranks
        first = rank * each - key * len(group)
        wanted = [("q", number) for number in range(first, first + each)] + [("k", 0), ("v", 0)]
        assert got == [(kind, key, number, place) for kind, number in wanted for place in range(width)]
