"""Adapters on two ranks (gloo, or two GPUs) are those of one: what they compute, learn, save and load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.conditioning import Conditioned
from tests.engine.policy.batches import grouped_batch
from tests.engine.policy.ranks import run_ranks, two_steps
from tests.models import hybrid_twins
from tests.models.checkpoints import write_checkpoint

PEFT = {"peft": {"enabled": True, "dim": 4, "alpha": 8}}
TENSOR = {"tensor_model_parallel_size": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "data, distributed optimizer": {"optimizer": {"use_distributed_optimizer": True}},
    "tensor": TENSOR,
    "tensor, sequence": {**TENSOR, "sequence_parallel": True, "activation_checkpointing": True},
    "pipeline": {"pipeline_model_parallel_size": 2},
    "context": {"context_parallel_size": 2},
}
HYBRID = ("tensor", "tensor, sequence", "context")
"""Layouts of a model with Mamba-2 projections, whose rows are cut part by part."""
SAVED, LOADED = "tensor", "pipeline"
"""Layouts that a training checkpoint is written in, and loaded in."""


def scenarios(ranks: int, folders: dict[str, Path], out: Path) -> dict[str, Any]:
    results = {}
    for layout, megatron in LAYOUTS.items():
        results[layout], policy = two_steps(folders["qwen3"], {**megatron, **PEFT})
        policy.save_adapter(out / layout, str(folders["qwen3"]), "")
        if layout == SAVED:
            policy.save_checkpoint(str(out / "step"))
    for layout in HYBRID:
        results[f"hybrid, {layout}"], policy = two_steps(folders["hybrid"], {**LAYOUTS[layout], **PEFT})
        policy.save_adapter(out / f"hybrid, {layout}", str(folders["hybrid"]), "")
    from nemotron_steps.engine.policy.checkpoint import random_states
    from tests.engine.policy.batches import grouped_batch

    _, policy = two_steps(folders["qwen3"], {**LAYOUTS[LOADED], **PEFT})
    policy.train_step(grouped_batch(2))
    policy.load_checkpoint(str(out / "step"))
    results["resharded"] = {"after": policy.logprobs(grouped_batch(0)).tolist()}
    dropped = {"peft": {**PEFT["peft"], "dropout": 0.5}}
    _, unbroken = two_steps(folders["qwen3"], dropped)
    unbroken.save_checkpoint(str(out / "dropped"))
    states = random_states(())["of_rank"]
    expected = unbroken.train_step(grouped_batch(2))
    _, resumed = two_steps(folders["qwen3"], dropped)
    resumed.load_checkpoint(str(out / "dropped"))
    results["dropout"] = {"states": states, "unbroken": expected, "resumed": resumed.train_step(grouped_batch(2))}
    return results


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

    def of_one(folder, *batches):
        found, policy = two_steps(folder, PEFT, batches)
        policy.save_adapter(root / f"one {folder.name}", str(folder), "")
        return found | {"adapter": load_file(root / f"one {folder.name}" / "adapter_model.safetensors")}

    batches = grouped_batch(0), grouped_batch(1)
    return ranks[0], {name: Conditioned(of_one, folder, *batches) for name, folder in folders.items()}, root


@pytest.mark.parametrize("layout", [*LAYOUTS, *(f"hybrid, {layout}" for layout in HYBRID)])
def test_two_ranks_train_adapters_like_one(layout, found_and_expected):
    found, one, root = found_and_expected
    adapter = load_file(root / layout / "adapter_model.safetensors")
    one["hybrid" if layout.startswith("hybrid") else "qwen3"].check(found[layout] | {"adapter": adapter})


def test_a_training_checkpoint_of_adapters_loads_in_another_layout(found_and_expected):
    found, one, _ = found_and_expected
    one["qwen3"]["after"].check(found["resharded"]["after"])


def test_ranks_that_drew_different_amounts_go_on_with_the_dropout_that_each_of_them_would_have_had(found_and_expected):
    found, _, _ = found_and_expected
    assert found["dropout"]["states"] == [0, 1]  # else this shows nothing
    assert found["dropout"]["resumed"] == found["dropout"]["unbroken"]
