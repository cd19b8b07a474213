"""Parameters are counted as the models have them."""

from __future__ import annotations

import math

import pytest

from nemotron_steps.config.layout.memory.shape import Held, ModelShape, held, held_ahead, held_by_adapters
from nemotron_steps.config.layout.parallel_config import ParallelConfig
from nemotron_steps.models.architecture import Architecture
from nemotron_steps.models.mapping import megatron_shape, parameters
from tests.config.layout.memory.shapes import NANO_4B, NANO_30B, QWEN3_8B, QWEN3_30B_A3B, SUPER_120B

NEEDED = {"max_position_embeddings": 262144}


@pytest.mark.parametrize(
    ("config", "billions"),
    [(NANO_30B, 31.58), (SUPER_120B, 120.7), (NANO_4B, 3.97), (QWEN3_8B, 8.19), (QWEN3_30B_A3B, 30.53)],
    ids=["nano", "super", "nano 4b", "qwen3 8b", "qwen3 30b"],
)
def test_published_models_have_their_published_sizes(config, billions):
    shape = ModelShape.read(config)
    assert shape.parameters / 1e9 == pytest.approx(billions, rel=2e-3)
    # And to the last one those that conversion knows.
    architecture = Architecture.from_config({**config, **NEEDED})
    known = sum(math.prod(megatron_shape(parameter)) for parameter in parameters(architecture))
    assert shape.parameters == known


def test_both_generations_of_config_files_give_one_shape():
    names = {"M": "mamba", "E": "moe", "*": "attention", "-": "mlp"}
    newer = {key: value for key, value in NANO_30B.items() if key != "hybrid_override_pattern"}
    newer["layers_block_type"] = [names[letter] for letter in NANO_30B["hybrid_override_pattern"]]
    assert ModelShape.read(newer) == ModelShape.read(NANO_30B)


@pytest.mark.parametrize(("config", "heads", "width"), [(QWEN3_8B, 32, 128), (QWEN3_30B_A3B, 4, 64), (NANO_4B, 8, 128)])
def test_a_key_that_is_absent_is_transformers_default_as_for_whoever_builds_the_model(config, heads, width):
    sparse = {key: value for key, value in config.items() if key not in ("head_dim", "num_key_value_heads")}
    shape, built = ModelShape.read(sparse), Architecture.from_config({**sparse, **NEEDED})
    assert (shape.key_value_heads, shape.head_dim) == (heads, width)
    assert (built.num_key_value_heads, built.head_dim) == (heads, width)


@pytest.mark.parametrize("missing", ["vocab_size", "hidden_size", "mamba_num_heads", "num_experts_per_tok"])
def test_a_config_that_says_too_little_has_no_shape(missing):
    assert ModelShape.read({key: value for key, value in NANO_30B.items() if key != missing}) is None


def test_ranks_hold_the_model_once():
    """Over the ranks of a layout that cuts everything, each parameter that is cut is on one of them."""
    shape = ModelShape.read(QWEN3_30B_A3B)
    sizes = ParallelConfig(tensor=4, pipeline=2, expert=8)
    stages = [held(shape, sizes, stage) for stage in range(2)]
    assert 8 * sum(stage.experts for stage in stages) == held(shape, ParallelConfig(), 0).experts
    whole = held(shape, ParallelConfig(), 0).dense
    replicated = 4 * sum(stage.dense for stage in stages) - whole
    # Norms and routers, three more times each.
    layer = 2 * shape.hidden + 2 * shape.head_dim + shape.experts * shape.hidden
    assert replicated == 3 * (48 * layer + shape.hidden)


def test_adapters_are_counted_of_what_is_named_and_not_excluded():
    """Of dimension 4: 36 layers of Qwen3 8B, 18 on a stage of two; Nano's six layers that attend and 23 of Mamba-2."""
    qkv, proj = 4 * (4096 + 48 * 128), 4 * (4096 + 32 * 128)
    mlp = 4 * (4096 + 2 * 12288) + 4 * (4096 + 12288)

    def held_of(config, targets, excluded, **layout):
        return held_by_adapters(ModelShape.read(config), ParallelConfig(**layout), 0, 4, targets, excluded).dense

    assert held_of(QWEN3_8B, (), ()) == 36 * (qkv + proj + mlp)
    assert held_of(QWEN3_8B, (), ("*.linear_fc1", "linear_fc2")) == 36 * (qkv + proj)
    assert held_of(QWEN3_8B, ("linear_qkv", "linear_proj"), ("linear_proj",), pipeline=2) == 18 * qkv
    rows = 2 * 64 * 64 + 2 * 8 * 128 + 64
    assert held_of(NANO_30B, ("in_proj",), ()) == 23 * 4 * (2688 + rows)
    assert held_of(NANO_30B, ("linear_qkv",), (), tensor=2) == 6 * 4 * (2688 + (32 + 2 * 2) * 128 // 2)


def test_a_hybrids_output_layer_is_its_own_and_blocks_ahead_are_there_where_they_are_trained():
    config = {**NANO_30B, "tie_word_embeddings": True, "num_nextn_predict_layers": 2}
    shape = ModelShape.read(config)
    assert not shape.tied and ModelShape.read({**QWEN3_8B, "tie_word_embeddings": True}).tied
    assert held_ahead(shape, ParallelConfig(), 0) == Held()
    trained = ParallelConfig(mtp_layers=1, pipeline=2)
    assert held_ahead(shape, trained, 0) == Held() != held_ahead(shape, trained, 1)
