"""Adapters on two ranks, in every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.engine.policy.ranks import two_steps

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
