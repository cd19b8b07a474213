"""More ranks than key-value heads, or than heads: every rank, and every file, has what one process has."""

from __future__ import annotations

import functools

import pytest
import torch
from safetensors.torch import load_file

from nemotron_steps.engine.policy.attention.few_heads import columns
from nemotron_steps.models.huggingface import load_hf_weights
from nemotron_steps.models.megatron_checkpoint import convert_megatron_to_hf
from tests.conditioning import Conditioned
from tests.engine.policy.batches import SMOOTH, grouped_batch
from tests.engine.policy.few_heads import CASES, MODELS, scenarios, steps
from tests.engine.policy.ranks import run_ranks
from tests.models.checkpoints import write_checkpoint
from tests.models.hybrid_twins import TWINS, write_hybrid


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """Model → its folder, and what one process finds: figures, tensors and those of a third step."""
    root = tmp_path_factory.mktemp("alone")

    @functools.cache
    def train(model):
        shape, changes = MODELS[model]
        if shape in TWINS:
            write_hybrid(shape, root / model, initializer_range=0.1, vocab_size=201, **changes)
        else:
            write_checkpoint(shape, root / model, initializer_range=0.1, num_hidden_layers=2, vocab_size=201, **changes)

        def three(folder, *batches):
            found, tensors, policy = steps(folder, {}, batches[:2])
            if folder == root / model:
                policy.save_checkpoint(str(root / f"{model} alone"))
            return {**found, "tensors": tensors, "third": policy.train_step(batches[2])}

        return root / model, Conditioned(three, root / model, *(grouped_batch(seed) for seed in range(3)))

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
    folder, expected = one(model)
    written = load_file(out / f"{case}.safetensors")
    went_on, loaded, read_by_other = found[case].pop("third")
    for part, theirs in {**found[case], "tensors": written, "third": loaded}.items():  # saved by one process
        expected[part].check(theirs)
    expected["third"].check(went_on)
    expected["third"].check(read_by_other)  # saved by these ranks
    for name, weight in load_hf_weights(folder).items():
        parameter = torch.nn.Parameter(weight.clone())
        parameter.grad = written[f"gradient {name}"]
        decay = SMOOTH["weight_decay"] if weight.dim() > 1 else 0.0
        torch.optim.AdamW([parameter], lr=SMOOTH["lr"], eps=SMOOTH["adam_eps"], weight_decay=decay).step()
        torch.testing.assert_close(written[name], parameter.detach(), atol=1e-6, rtol=0)
    convert_megatron_to_hf(out / f"{case} as megatron", tmp_path / "hf")
    exported = load_hf_weights(tmp_path / "hf")
    for name, tensor in exported.items():
        assert torch.equal(tensor, written[f"second {name}"]), name


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
