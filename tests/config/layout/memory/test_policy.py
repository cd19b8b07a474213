"""Weights, gradients and optimizer state of ranks, predicted and counted: to the byte."""

import json
import subprocess
import sys

import pytest

from nemotron_steps.config.layout.memory.policy import stage_memory
from nemotron_steps.config.layout.memory.settings import MemorySettings
from nemotron_steps.config.layout.memory.shape import ModelShape
from tests.config.layout.memory.shapes import flat
from tests.models import hybrid_twins
from tests.models.checkpoints import write_checkpoint

DISTRIBUTED = {"optimizer": {"use_distributed_optimizer": True}}
TENSOR, PIPELINE = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
EXPERT = {"expert_model_parallel_size": 2}
NARROW = {"use_precision_aware_optimizer": True, "exp_avg_dtype": "bfloat16"}
OFFLOADED = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5}
PEFT = {"enabled": True, "dim": 4, "alpha": 8}
CASES = {
    # name: (model, megatron_cfg, precision, ranks)
    "alone": ("qwen3", {}, "bfloat16", 1),
    "data, distributed": ("qwen3", DISTRIBUTED, "bfloat16", 2),
    "float32, distributed": ("qwen3", DISTRIBUTED, "float32", 4),
    "tensor": ("qwen3", TENSOR, "bfloat16", 2),
    "tensor, tied, biases": ("qwen2_tied", TENSOR, "float32", 2),
    "pipeline, tied": ("llama_tied", {**PIPELINE, **DISTRIBUTED}, "bfloat16", 4),
    "context": ("qwen3", {"context_parallel_size": 2, **DISTRIBUTED}, "bfloat16", 4),
    "experts": ("qwen3_moe", {**EXPERT}, "bfloat16", 2),
    "experts, tensor, frozen router": (
        "qwen3_moe",
        {**EXPERT, **TENSOR, "sequence_parallel": True, "freeze_moe_router": True, **DISTRIBUTED},
        "bfloat16",
        8,
    ),
    "hybrid, float32": ("mixture", {**DISTRIBUTED}, "float32", 2),
    "hybrid, tensor, pipeline": ("dense", {**TENSOR, **PIPELINE, **DISTRIBUTED}, "bfloat16", 4),
    "hybrid, experts, tensor, frozen router": (
        "latent",
        {**EXPERT, **TENSOR, "sequence_parallel": True, "freeze_moe_router": True, **DISTRIBUTED},
        "bfloat16",
        4,
    ),
    "adapters": ("qwen3", {"peft": PEFT}, "bfloat16", 1),
    "adapters, tensor, distributed": ("qwen3", {"peft": PEFT, **TENSOR, **DISTRIBUTED}, "bfloat16", 4),
    "adapters beside experts": ("qwen3_moe", {"peft": {**PEFT, "target_modules": ["linear_proj"]}}, "float32", 1),
    "adapters, Mamba-2, tensor": ("dense", {"peft": PEFT, **TENSOR}, "bfloat16", 2),
    "prediction, experts, tensor, pipeline, frozen router": (
        "mtp",
        {
            **{**EXPERT, **TENSOR, **PIPELINE, **DISTRIBUTED},
            **{"sequence_parallel": True, "freeze_moe_router": True, "mtp_detach_heads": True},
            **{"mtp_num_layers": 3, "mtp_use_repeated_layer": True},
        },
        "bfloat16",
        4,
    ),
    "precision-aware": ("qwen3", {"optimizer": NARROW}, "bfloat16", 1),
    "offloaded": ("qwen3", {"optimizer": OFFLOADED}, "bfloat16", 1),
}


@pytest.fixture(scope="module")
def counted(tmp_path_factory):
    """Case → bytes of the first and the last rank, built on a fake process group in a program of its own."""
    root = tmp_path_factory.mktemp("ranks")
    cases = []
    for name in {model for model, *_ in CASES.values()}:
        if name in hybrid_twins.TWINS:
            hybrid_twins.write_hybrid(name, root / name)
        else:
            write_checkpoint(name, root / name, num_hidden_layers=4)
    for model, megatron, precision, ranks in CASES.values():
        cases.append([str(root / model), {"precision": precision, "megatron_cfg": megatron}, ranks])
    (root / "cases.json").write_text(json.dumps(cases))
    command = [sys.executable, "-m", "tests.config.layout.memory.rank_bytes", str(root / "cases.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    shapes = {model: json.loads((root / model / "config.json").read_text()) for model, *_ in CASES.values()}
    return dict(zip(CASES, json.loads(done.stdout.splitlines()[-1]), strict=True)), shapes


@pytest.mark.parametrize("case", CASES)
def test_what_a_rank_holds_is_predicted_to_the_byte(case, counted):
    model, megatron, precision, ranks = CASES[case]
    found, shapes = counted
    shape = ModelShape.read(shapes[model])
    values = {
        "policy": {
            "precision": precision,
            "megatron_cfg": megatron,
            "train_global_batch_size": 8,
            "max_total_sequence_length": 64,
        },
        "cluster": {"backend": "ray", "gpus_per_node": ranks},
    }
    settings = MemorySettings.read(flat(values).get)
    for stage, of_rank in ((0, found[case][0]), (settings.sizes.pipeline - 1, found[case][-1])):
        memory = stage_memory(shape, settings, stage)
        assert {
            "weights": memory.rests["weights"],
            "gradients": memory.trains["gradients"],
            "optimizer": memory.rests["optimizer"],
            "host": memory.host.get("optimizer", 0),
        } == of_rank
