"""More ranks than key-value heads, or than heads: every rank, and every file, has what one process has."""

from __future__ import annotations

import functools

import pytest
import torch
from safetensors.torch import load_file

from nemotron_steps.engine.policy.attention.shared_heads import columns
from nemotron_steps.models.huggingface import load_hf_weights
from nemotron_steps.models.megatron_checkpoint import convert_megatron_to_hf
from tests.engine.policy.batches import grouped_batch
from tests.engine.policy.few_heads import CASES, MODELS, scenarios, steps
from tests.engine.policy.ranks import run_ranks
from tests.models.checkpoints import write_checkpoint
from tests.models.hybrid_twins import TWINS, write_hybrid

COMPARED = ("loss", "grad_norm", "entropy", "num_valid_tokens", "probs_ratio_max", "token_mult_prob_error")


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """Model → what one process finds: (folder, found, tensors)."""
    root = tmp_path_factory.mktemp("alone")

    @functools.cache
    def train(model):
        shape, changes = MODELS[model]
        if shape in TWINS:
            write_hybrid(shape, root / model, initializer_range=0.1, vocab_size=201, **changes)
        else:
            write_checkpoint(shape, root / model, initializer_range=0.1, num_hidden_layers=2, vocab_size=201, **changes)
        found, tensors, policy = steps(root / model, {})
        policy.save_checkpoint(str(root / f"{model} alone"))
        found["third"] = policy.train_step(grouped_batch(2))
        return root / model, found, tensors

    return train


@pytest.fixture(scope="module")
def found_by(one, tmp_path_factory):
    """Number of ranks → (what they found, the folder that they wrote to)."""

    @functools.cache
    def run(ranks):
        out = tmp_path_factory.mktemp(f"ranks{ranks}")
        folders = {model: one(model)[0] for model in CASES[ranks]}
        for model, folder in folders.items():
            (out / f"{model} alone").symlink_to(folder.with_name(f"{model} alone"))
        answers = run_ranks(ranks, out, folders, scenarios)
        assert all(answer == answers[0] for answer in answers)
        return answers[0], out

    return run


def cases():
    for ranks, models in CASES.items():
        for model, layouts in models.items():
            for layout in layouts:
                marks = [pytest.mark.slow] if ranks > 2 else []
                yield pytest.param(
                    ranks, model, f"{model}: {layout}", marks=marks, id=f"{ranks} ranks, {model}, {layout}"
                )


@pytest.mark.parametrize(("ranks", "model", "case"), list(cases()))
def test_ranks_that_share_heads_train_like_one(ranks, model, case, one, found_by, tmp_path):
    found, out = found_by(ranks)
    folder, expected, tensors = one(model)
    before, theirs = torch.tensor(found[case]["before"]), torch.tensor(expected["before"])
    torch.testing.assert_close(before, theirs, atol=2e-5, rtol=0)
    for mine, alone in zip(found[case]["metrics"], expected["metrics"], strict=True):
        assert_same_metrics(mine, alone)
    written = load_file(out / f"{case}.safetensors")
    assert set(written) == set(tensors)
    norm = expected["metrics"][0]["grad_norm"]
    start = load_hf_weights(folder)
    for name, weight in start.items():
        gradient = written[f"gradient {name}"]
        torch.testing.assert_close(gradient, tensors[f"gradient {name}"], atol=2e-5 * norm, rtol=1e-3)
        parameter = torch.nn.Parameter(weight.clone())
        parameter.grad = gradient
        torch.optim.AdamW([parameter], lr=1e-2, weight_decay=0.1 if weight.dim() > 1 else 0.0).step()
        torch.testing.assert_close(written[name], parameter.detach(), atol=1e-6, rtol=0)
    went_on, loaded, read_by_other = found[case]["third"]
    assert_same_metrics(loaded, expected["third"])  # saved by one process
    assert_same_metrics(read_by_other, went_on)  # saved by these ranks
    convert_megatron_to_hf(out / f"{case} as megatron", tmp_path / "hf")
    exported = load_hf_weights(tmp_path / "hf")
    for name, tensor in exported.items():
        assert torch.equal(tensor, written[f"second {name}"]), name


def assert_same_metrics(found, expected):
    for name in COMPARED:
        assert found[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name


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
