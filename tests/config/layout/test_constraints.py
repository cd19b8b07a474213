"""What of a layout does not come out even over a model."""

from __future__ import annotations

from typing import Any

import pytest

from nemotron_steps.config.layout.constraints import (
    Violation,
    _megatron_violations,
    causes,
    device_violations,
    format_violations,
    judge_violations,
    model_violations,
    violations,
)
from nemotron_steps.config.layout.model_spec import ModelSpec
from nemotron_steps.config.layout.parallel_config import JudgeLayout, ParallelConfig, TeacherLayout, judge_copies


@pytest.mark.parametrize(
    ("tensor", "heads", "shared", "head_dim", "wrong"),
    [
        (8, 32, 2, 128, None),
        (4, 6, 2, 64, "tensor_model_parallel_size=4 does not divide attention heads"),
        (6, 12, 4, 64, "tensor_model_parallel_size=6 does not divide key-value heads"),
        (6, 36, 2, 64, "tensor_model_parallel_size=6 does not divide the rows of queries, keys and values"),
        (6, 36, 2, 96, None),
    ],
)
def test_tensor_parallelism_may_exceed_the_key_value_heads(
    tensor: int, heads: int, shared: int, head_dim: int, wrong: str | None
) -> None:
    facts = {"num_attention_heads": heads, "num_key_value_heads": shared, "head_dim": head_dim}
    model = ModelSpec.from_attributes({"model_type": "llama", **facts})
    assert model is not None
    sizes = ParallelConfig(tensor=tensor, context=8)
    found = [violation.what for violation in violations(sizes, model)]
    assert found == ([] if wrong is None else [wrong])
    assert wrong is None or not violations(ParallelConfig(tensor=2, context=8), model)


@pytest.mark.parametrize(("model_type", "pipeline", "fits"), [
    ("nemotron_h", 4, True), ("nemotron_h", 3, True), ("nemotron_h", 5, False),
    ("llama", 4, True), ("llama", 2, True), ("llama", 3, False),
])  # fmt: skip
def test_every_pipeline_stage_has_a_layer_and_of_alike_layers_as_many(
    model_type: str, pipeline: int, fits: bool
) -> None:
    found = list(_megatron_violations(ParallelConfig(pipeline=pipeline), ModelSpec(model_type, layers=4)))
    assert (found == []) == fits


def test_judges_fill_an_equal_share_of_their_nodes_each() -> None:
    kept = ParallelConfig(nodes=4, judge_nodes=2, gpus_per_node=8)
    judges = (JudgeLayout("a", width=2), JudgeLayout("b", width=3))
    assert judge_copies(kept, judges) == {"a": 4, "b": 2}  # of width 3 a node holds two
    assert [*judge_violations(kept, judges)] == []
    assert judge_copies(kept, (*judges[:1], JudgeLayout("b", width=8, replicas=2))) == {"a": 4, "b": 2}
    assert [
        violation.expected for violation in judge_violations(kept, (*judges[:1], JudgeLayout("b", width=8, replicas=2)))
    ] == ["24 GPUs for 4 x a, 2 x b"]
    assert judge_copies(ParallelConfig(), judges) == {"a": 1, "b": 1}


@pytest.mark.parametrize(
    ("layout", "groups", "wrong"),
    [
        ({"context": 2}, 4, None),
        ({"context": 8}, 4, None),  # two ranks share a group
        ({"context": 4, "tensor": 2}, 4, None),
        ({"context": 4}, 6, "context_parallel_size=4 does not divide Mamba groups of a tensor-parallel rank"),
        ({"context": 4, "tensor": 2}, 6, "context_parallel_size=4 does not divide Mamba groups"),
        ({"context": 16}, 4, "context_parallel_size=16 does not divide Mamba heads of a tensor-parallel rank"),
        ({"tensor": 4}, 2, "tensor_model_parallel_size=4 does not divide Mamba heads and their groups"),
        ({"uses_vllm": True, "generator_width": 4}, 8, None),
        ({"uses_vllm": True, "generator_width": 4}, 1, None),  # which vLLM repeats
        ({"uses_vllm": True, "generator_width": 4}, 2, "does not divide groups of Mamba heads (vLLM)"),
        ({"uses_vllm": True, "generator_width": 16}, 1, "does not divide Mamba heads (vLLM)"),
    ],
)
def test_mamba_is_cut_by_heads_and_groups_of_them(layout: dict[str, Any], groups: int, wrong: str | None) -> None:
    model = ModelSpec("nemotron_h", mamba_heads=24 if groups == 6 else 8, mamba_groups=groups)
    found = [violation.what for violation in model_violations(ParallelConfig(samples=True, **layout), model)]
    assert len(found) == (wrong is not None) and all(wrong in what for what in found if wrong is not None)


@pytest.mark.parametrize(
    ("field", "key"),
    [
        ("length", "policy.max_total_sequence_length"),
        ("length_end", "policy.max_total_sequence_length_end"),
        ("new_tokens", "policy.generation.max_new_tokens"),
    ],
)
def test_sequences_are_at_most_as_long_as_the_models_positions(field: str, key: str) -> None:
    model = ModelSpec("qwen3", positions=512)
    assert violations(ParallelConfig(**{field: 512}), model) == []
    assert violations(ParallelConfig(**{field: 513}), ModelSpec("qwen3")) == []
    (found,) = violations(ParallelConfig(**{field: 513}), model)
    what = f"{key.rpartition('.')[2]}=513 is more than the positions of the model"
    assert found == Violation("model", key, what, "at most 512", "513")


@pytest.mark.parametrize(("shared", "wrong"), [(None, True), (6, True), (8, False)])
def test_a_model_that_does_not_share_keys_and_values_has_as_many_heads_of_them(shared: int | None, wrong: bool) -> None:
    counted = {} if shared is None else {"num_key_value_heads": shared}
    model = ModelSpec.from_attributes({"model_type": "llama", "num_attention_heads": 6, **counted})
    assert model is not None
    found = [violation.what for violation in model_violations(ParallelConfig(dtensor=True, tensor=4), model)]
    assert found == (["tensor_parallel_size=4 does not divide key-value heads"] if wrong else [])


@pytest.mark.parametrize(
    ("layout", "product"),
    [
        ({"tensor": 3}, "TP 3"),
        ({"pipeline": 3}, "TP 1 × PP 3 = 3"),
        ({"tensor": 3, "context": 2}, "TP 3 × CP 2 = 6"),
        ({"tensor": 3, "pipeline": 2, "context": 2}, "TP 3 × PP 2 × CP 2 = 12"),
    ],
)
def test_a_copy_of_the_model_is_told_as_the_sizes_that_make_it(layout: dict[str, int], product: str) -> None:
    (found,) = violations(ParallelConfig(gpus_per_node=8, **layout))
    assert (found.expected, found.found) == (f"a multiple of {product}", "8 GPUs for training")
    (found,) = violations(ParallelConfig(backend="ray", **layout))
    assert (found.expected, found.found) == (f"a multiple of {product}", "1 rank on CPU")
    assert violations(ParallelConfig(**layout)) == []  # of one process nothing is placed


NANO = ModelSpec(
    "nemotron_h", layers=52, attention_heads=32, key_value_heads=2, experts=128, shared_width=3712, mamba_heads=64,
    mamba_groups=8,
)  # fmt: skip


def test_a_size_that_several_counts_are_not_divided_by_is_told_once() -> None:
    found = violations(ParallelConfig(tensor=3, sequence_parallel=True, gpus_per_node=8), NANO)
    assert len(found) == 3
    what = "attention heads, nor Mamba heads and their groups, nor the shared expert's width"
    assert format_violations(found) == (f"tensor_model_parallel_size=3 does not divide {what}", "a divisor of 8", "3")
    assert format_violations([*found, *found]) == format_violations(found)  # of several models alike
    shared = ModelSpec("llama", attention_heads=36, key_value_heads=4, mlp_width=1024)
    whole = "a divisor of 1024, and a divisor or multiple of 4"
    assert format_violations(violations(ParallelConfig(tensor=6), shared))[1] == whole
    lengths = violations(
        ParallelConfig(tensor=3, length=9, new_tokens=9), ModelSpec("llama", attention_heads=4, positions=8)
    )
    assert format_violations(lengths)[1:] == (
        "tensor_model_parallel_size: a divisor of 4; max_total_sequence_length: at most 8; max_new_tokens: at most 8",
        "tensor_model_parallel_size: 3; max_total_sequence_length: 9; max_new_tokens: 9",
    )


@pytest.mark.parametrize(
    ("layout", "devices"),
    [
        ({"tensor": 3}, []),
        ({"expert": 7}, []),
        ({"context": 3}, []),
        ({"samples": True, "uses_vllm": True, "generator_width": 3}, []),
        ({"tensor": 3, "pipeline": 3}, ["the layout does not divide the GPUs that train"]),
        ({"expert": 7, "workers": 2}, ["on GPUs the number of policy ranks follows from the devices"]),
    ],
)
def test_a_cut_that_the_model_has_not_is_not_told_of_the_devices_too(
    layout: dict[str, Any], devices: list[str]
) -> None:
    found = violations(ParallelConfig(sequence_parallel=True, gpus_per_node=8, **layout), NANO)
    assert found[0].about == "model"
    assert [violation.what for violation in found if violation.about == "devices"] == devices


def test_a_cut_that_is_wrong_anyway_is_no_cause_of_what_devices_lack() -> None:
    teachers = (TeacherLayout("a", tensor=3), TeacherLayout("b", tensor=3), TeacherLayout("c", tensor=3, section="own"))
    sizes = ParallelConfig(nodes=4, gpus_per_node=8, backend="ray", pipeline=3, teachers=teachers)
    found = list(device_violations(sizes))
    assert [violation.what for violation in found] == [
        "the layout of teachers a and b does not divide their GPUs",
        "the layout of teacher c does not divide its GPUs",
        "the layout does not divide the GPUs that train",
    ]
    assert causes(sizes, found, ()) == found
    assert causes(sizes, found, {teachers[0].key("tensor")}) == found[1:]
    assert causes(sizes, found, {teachers[2].key("tensor"), "policy.megatron_cfg.pipeline_model_parallel_size"}) == [
        found[0]
    ]
