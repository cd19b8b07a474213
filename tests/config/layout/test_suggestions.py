"""One hint for a layout that is refused: what each broken rule asks for, such that nothing is left to refuse."""

from __future__ import annotations

from typing import Any

import pytest

from nemotron_steps.config.layout.constraints import Violation, pasted, raise_if_violated, suggestion, violations
from nemotron_steps.config.layout.model_spec import ModelSpec
from nemotron_steps.config.layout.parallel_config import ParallelConfig
from nemotron_steps.errors import ConfigError


def mend(sizes: ParallelConfig, model: ModelSpec | None = None, most_nodes: int | None = None) -> str | None:
    hints = pasted(suggestion(sizes, lambda after: violations(after, model), most_nodes))
    return hints[0] if hints else None


@pytest.mark.parametrize(("batch", "mended"), [(1, 8), (3, 8), (11, 8), (13, 16), (30, 32)])
def test_a_batch_becomes_the_nearest_that_gives_every_rank_as_much(batch: int, mended: int) -> None:
    sizes = ParallelConfig(batch=batch, backend="ray", gpus_per_node=8)
    assert mend(sizes) == f"policy.train_global_batch_size={mended}"


@pytest.mark.parametrize(
    ("length", "end", "mended"),
    [
        (8192, None, "policy.max_total_sequence_length=4096"),
        (8192, 16384, "policy.max_total_sequence_length=4096 policy.max_total_sequence_length_end=null"),
        (2048, 16384, "policy.max_total_sequence_length_end=4096"),
    ],
)
def test_sequences_end_where_the_models_positions_do(length: int, end: int | None, mended: str) -> None:
    model = ModelSpec("qwen3", layers=2, positions=4096)
    assert mend(ParallelConfig(length=length, length_end=end), model) == mended


@pytest.mark.parametrize(
    ("sizes", "model", "mended"),
    [
        ({"router_replay": True}, ModelSpec("qwen3"), "policy.router_replay.enabled=false"),
        (
            {"router_bias_update_rate": 0.1, "samples": True},
            ModelSpec("qwen3_moe", experts=8),
            "policy.megatron_cfg.moe_router_bias_update_rate=0",
        ),
        ({"model_type": "llama"}, ModelSpec("qwen3"), "policy.model_type=null"),
        ({"new_tokens": 600}, ModelSpec("qwen3", positions=512), "policy.generation.max_new_tokens=512"),
        (
            {"uses_vllm": True, "samples": True, "generator_width": 2},
            ModelSpec("nemotron_h", bounds_time_steps=True),
            "policy.generation.backend=embedded",
        ),
        (
            {"tensor": 2, "backend": "ray", "gpus_per_node": 2},
            ModelSpec("qwen3_moe", experts=8),
            "policy.megatron_cfg.sequence_parallel=true",
        ),
        ({"workers": 4, "gpus_per_node": 2}, None, "cluster.policy_workers=null"),
        ({"tensor": 3, "gpus_per_node": 2}, None, "policy.megatron_cfg.tensor_model_parallel_size=2"),
        (
            {"on_policy": True, "batch": 4, "prompts": 4, "group": 2},
            None,
            "policy.train_global_batch_size=8",
        ),
    ],
)
def test_what_a_model_or_the_devices_have_not_is_left_out(
    sizes: dict[str, Any], model: ModelSpec | None, mended: str
) -> None:
    assert mend(ParallelConfig(**sizes), model) == mended


HEADS = ModelSpec("qwen3", attention_heads=32, key_value_heads=8, layers=48)
MIXTURE = ModelSpec("qwen3_moe", attention_heads=32, experts=128)
CUT = "policy.megatron_cfg.{}_model_parallel_size={}"
WIDE = CUT.format("tensor", 1)


@pytest.mark.parametrize(
    ("sizes", "model", "most", "mended"),
    [
        ({"tensor": 3, "gpus_per_node": 8}, HEADS, None, CUT.format("tensor", 4)),
        ({"tensor": 8, "gpus_per_node": 4}, None, None, CUT.format("tensor", 4)),
        ({"tensor": 16, "nodes": 3, "gpus_per_node": 8}, HEADS, None, CUT.format("tensor", 8)),
        ({"tensor": 2, "pipeline": 8, "gpus_per_node": 8}, HEADS, None, "cluster.num_nodes=2"),
        ({"tensor": 2, "pipeline": 8, "gpus_per_node": 8}, HEADS, 1, CUT.format("tensor", 1)),
        ({"tensor": 3, "pipeline": 5, "gpus_per_node": 8}, None, None, f"{WIDE} {CUT.format('pipeline', 1)}"),
        ({"expert": 7, "gpus_per_node": 8}, MIXTURE, None, CUT.format("expert", 8)),
        ({"expert": 16, "gpus_per_node": 8}, MIXTURE, None, CUT.format("expert", 8)),
        ({"tensor": 2, "expert": 4, "workers": 1}, None, None, "cluster.policy_workers=4"),
        ({"tensor": 2, "pipeline": 2, "expert": 4, "workers": 1}, None, None, "cluster.policy_workers=8"),
        ({"tensor": 720_720, "gpus_per_node": 8}, HEADS, None, CUT.format("tensor", 8)),
    ],
)  # fmt: skip
def test_a_layout_is_mended_by_the_nearest_size_that_divides_and_tp_stays_within_a_node(
    sizes: dict[str, Any], model: ModelSpec | None, most: int | None, mended: str
) -> None:
    assert mend(ParallelConfig(backend="ray", **sizes), model, most) == mended


def test_what_is_refused_alone_is_what_was_found() -> None:
    sizes = ParallelConfig(batch=3, backend="ray", gpus_per_node=8, tensor=3)
    found = violations(sizes)
    assert [violation.about for violation in found] == ["devices"]
    raise_if_violated(sizes, found=[])
    other = Violation("batch", "policy.batch", "another", "1", "2")
    with pytest.raises(ConfigError, match="another") as caught:
        raise_if_violated(sizes, found=[other])
    assert (caught.value.where, caught.value.expected, caught.value.found) == ("policy.batch", "1", "2")
    with pytest.raises(ConfigError, match="does not divide") as caught:
        raise_if_violated(sizes)
    assert len(caught.value.hints) == 1
