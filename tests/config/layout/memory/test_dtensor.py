"""The memory of the dtensor policy, which cuts everything in float32 over its ranks: by hand."""

from typing import Any

from nemotron_steps.config.layout.memory.policy import Taken, stage_memory
from nemotron_steps.config.layout.memory.settings import MemorySettings
from nemotron_steps.config.layout.memory.shape import ModelShape
from tests.config.layout.memory.shapes import QWEN3_8B

SHAPE = ModelShape.read(QWEN3_8B)
RANKS = 8
LORA = {"lora_cfg.enabled": True, "lora_cfg.dim": 4}
LAYERS, HIDDEN, FFN, VOCABULARY, QUERY, SHARED = 36, 4096, 12288, 151936, 32 * 128, 8 * 128


def settings_of(values: dict[str, Any], **dtensor: Any) -> MemorySettings:
    config = {
        "policy.train_global_batch_size": 64,
        "policy.max_total_sequence_length": 1024,
        "cluster.backend": "ray",
        "cluster.gpus_per_node": RANKS,
        "policy.dtensor_cfg.enabled": True,
        **{f"policy.dtensor_cfg.{key}": value for key, value in dtensor.items()},
        **values,
    }
    return MemorySettings.read(config.get)


def rank_of(**dtensor: Any) -> Taken:
    assert SHAPE is not None
    return stage_memory(SHAPE, settings_of({"loss_fn.reference_policy_kl_penalty": 0.1}, **dtensor), 0)


def test_weights_gradients_and_both_moments_are_float32_and_cut_over_the_ranks():
    assert SHAPE is not None
    own = SHAPE.parameters // RANKS * 4
    rank = rank_of()
    assert (rank.rests, rank.trains["gradients"]) == ({"weights": own, "optimizer": 2 * own}, own)
    assert rank.host == {"reference weights": own} and rank.scores["reference weights"] == 0  # in their place


def test_low_rank_adapters_alone_are_trained_and_the_frozen_weights_are_the_reference():
    assert SHAPE is not None
    projections = [(HIDDEN, QUERY), *[(HIDDEN, SHARED)] * 2, (QUERY, HIDDEN), *[(HIDDEN, FFN)] * 2, (FFN, HIDDEN)]
    trained = LAYERS * 4 * sum(taken + given for taken, given in projections) // RANKS * 4
    whole, rank = rank_of(), rank_of(**LORA)
    weights = whole.rests["weights"] + trained
    assert (rank.rests, rank.trains["gradients"]) == ({"weights": weights, "optimizer": 2 * trained}, trained)
    assert rank.host == {}
    saved = VOCABULARY * HIDDEN * (4 + 2 * 2)  # the gradient of the output layer
    assert whole.trains["logprobs"] - rank.trains["logprobs"] == saved
    offloaded = rank_of(cpu_offload=True, **LORA)
    assert offloaded.host == {"weights": weights, "optimizer": 2 * trained}
    assert sum(offloaded.rests.values()) == offloaded.trains["gradients"] == 0
