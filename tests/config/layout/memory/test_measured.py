"""Predictions against what was measured on GPUs: within 15 %."""

import dataclasses
from pathlib import Path

import pytest

from benchmarks import bench_nano
from benchmarks.bench_gpu import MODELS, run_config
from nemotron_steps.config.layout.memory.devices import StepMemory, step_memory
from nemotron_steps.config.layout.memory.generation import GIB
from nemotron_steps.config.layout.memory.settings import MemorySettings
from nemotron_steps.config.layout.memory.shape import ModelShape
from nemotron_steps.config.layout.parallel_config import getter
from nemotron_steps.config.schema.rl import RlConfig
from tests.config.layout.memory.shapes import NANO_4B, NANO_30B

WITHIN = 0.15
H200 = 139.8
"""GiB that CUDA counts on one."""
MEASURED = {
    # name: (model, backend, what bench_gpu.run_config is told, GiB)
    # bench_gpu --parts embedded: peak of the reserved memory, micro-batches of 48
    "0.5 B embedded": ("0.5 B", "embedded", {}, 49.4),
    # bench_gpu --parts vllm: peak of the whole GPU; vLLM in a process of its own has 0.15 of it, and sleeps
    "0.5 B vLLM": ("0.5 B", "vllm", {}, 33.1),
    # bench_gpu --model "4 B": peak of the whole GPU; with vLLM after the first step
    "4 B embedded": ("4 B", "embedded", {"micro_batch": 32, "lean": True}, 89.8),
    "4 B vLLM": ("4 B", "vllm", {"micro_batch": 32, "lean": True, "utilization": 0.41}, 93.7),
    # bench_growth --model "4 B": 16 prompts x 8, peak of the reserved memory
    "4 B growth": ("4 B", "embedded", {"prompts": 16, "members": 8, "micro_batch": 16}, 103.8),
}
"""On one H200 (docs/benchmarks.md)."""


def benchmarked(model: str) -> ModelShape:
    """The checkpoint of benchmarks/grpo_task.make_large_checkpoint."""
    layers, hidden = MODELS[model]
    shape = ModelShape.read(
        {
            "model_type": "qwen3",
            "hidden_size": hidden,
            "intermediate_size": 3 * hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": hidden // 64,
            "num_key_value_heads": hidden // 128,
            "head_dim": 128,
            "tie_word_embeddings": True,
            "vocab_size": 32_000,
        }
    )
    assert shape is not None
    return shape


def predicted(model: str, backend: str, told: dict) -> StepMemory:
    return of_one_gpu(run_config(Path("model"), 3, backend, **told), benchmarked(model))


def of_one_gpu(values: dict, shape: ModelShape) -> StepMemory:
    config = RlConfig.model_validate({**values, "cluster": {"gpus_per_node": 1}})
    settings = MemorySettings.read(getter(config))
    return step_memory(dataclasses.replace(settings, gpu_memory_gib=H200), lambda role: shape)


@pytest.mark.parametrize("case", MEASURED)
def test_predictions_are_within_15_percent_of_measured_peaks(case):
    model, backend, told, measured = MEASURED[case]
    (device,) = predicted(model, backend, told).devices
    assert device.peak / GIB == pytest.approx(measured, rel=WITHIN)
    assert device.fits


def test_the_prediction_for_nano_4b_is_within_15_percent_of_the_measured_peak():
    """bench_nano: peak of the whole GPU, vLLM asleep while the policy trains; what is held for nothing with it."""
    shape = ModelShape.read(NANO_4B)
    assert shape is not None
    (device,) = of_one_gpu(bench_nano.nano_config(Path("model"), "4 B", 3, 1), shape).devices
    assert device.peak / GIB == pytest.approx(107.0, rel=WITHIN)


@pytest.mark.parametrize(
    ("layers", "gpus", "utilization", "gpu_gib", "measured"),
    [(13, 1, None, H200, 127.0), (26, 2, 0.28, H200, 125.6), (13, 2, 0.36, 79.2, 76.4)],
)
def test_predictions_for_nano_30b_are_within_15_percent(layers, gpus, utilization, gpu_gib, measured):
    """bench_nano --model "30 B", on an H200, on two and on two H100s: the larger peak of two GPUs."""
    pattern = NANO_30B["hybrid_override_pattern"][:layers]
    shape = ModelShape.read({**NANO_30B, "hybrid_override_pattern": pattern, "num_hidden_layers": layers})
    config = RlConfig.model_validate(bench_nano.nano_config(Path("model"), "30 B", 3, gpus, utilization))
    settings = dataclasses.replace(MemorySettings.read(getter(config)), gpu_memory_gib=gpu_gib)
    (device,) = step_memory(settings, lambda role: shape).devices
    assert device.peak / GIB == pytest.approx(measured, rel=WITHIN)
    assert device.fits
