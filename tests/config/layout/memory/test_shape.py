"""Parameters are counted as the models have them."""

import math

import pytest

from nemotron_steps.config.layout.memory.shape import ModelShape, held
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
