"""What a forward pass keeps for its gradients, predicted and counted: within 15 %."""

import json
from dataclasses import replace

import pytest

from nemotron_steps.config.layout.memory.activations import (
    Kept,
    inputs_ahead,
    kept,
    kept_ahead,
    kept_before_ahead,
    kept_by_all,
    kept_to_recompute,
)
from nemotron_steps.config.layout.memory.settings import MemorySettings
from nemotron_steps.config.layout.memory.shape import ModelShape
from tests.config.layout.memory.kept_tensors import built, kept_ahead_bytes, kept_by_transformers, kept_bytes
from tests.config.layout.memory.shapes import QWEN3_8B, QWEN3_30B_A3B, SUPER_120B, flat
from tests.models import hybrid_twins
from tests.models.checkpoints import write_checkpoint

WITHIN = 0.15
SIZES = {"hidden_size": 128, "intermediate_size": 320, "head_dim": 32}
MODELS = ("llama", "qwen2_tied", "qwen3_moe")
HYBRIDS = ("dense", "mixture", "latent")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("activations")
    for name in MODELS:
        write_checkpoint(name, root / name, **({} if name == "qwen2_tied" else SIZES))
    for name in HYBRIDS:
        hybrid_twins.write_hybrid(name, root / name, hidden_size=128, head_dim=32)
    return root


def predicted(shape: ModelShape, settings: MemorySettings, tokens: int, rows: int) -> int:
    once = kept_by_all(shape, settings).of(tokens)
    if settings.recomputes:
        return once + kept_to_recompute(shape, settings, shape.layers).of(tokens)
    return once + sum(kept(shape, layer, settings).of(tokens, rows) for layer in shape.layers)


@pytest.mark.parametrize("megatron", [{}, {"activation_checkpointing": True}], ids=["kept", "recomputed"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", (*MODELS, *HYBRIDS))
def test_kept_tensors_are_predicted(name, precision, megatron, folders):
    group = 8 if precision == "float32" else 1  # torch's own attention pads and repeats shared prompts
    counted, tokens = kept_bytes(built(folders / name, precision, megatron), rows=32, group=group)
    shape = ModelShape.read(json.loads((folders / name / "config.json").read_text()))
    values = {
        "policy": {
            "precision": precision,
            "megatron_cfg": megatron,
            "max_total_sequence_length": 64,
            "generation": {"backend": "embedded"},
        },
        "grpo": {"num_prompts_per_step": 32 // group, "num_generations_per_prompt": group},
    }
    settings = MemorySettings.read(flat(values).get)
    assert predicted(shape, settings, tokens, 32) == pytest.approx(counted, rel=WITHIN if name in HYBRIDS else 0.001)


@pytest.mark.parametrize("recomputed", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_what_multi_token_prediction_keeps_is_predicted(precision, recomputed, tmp_path):
    hybrid_twins.write_hybrid("mtp", tmp_path, hidden_size=128, head_dim=32)
    megatron = {"mtp_num_layers": 2, "mtp_use_repeated_layer": True, "activation_checkpointing": recomputed}
    counted, tokens = kept_ahead_bytes(built(tmp_path, precision, megatron), 32, 2)
    shape = ModelShape.read(json.loads((tmp_path / "config.json").read_text()))
    settings = MemorySettings.read(flat({"policy": {"precision": precision, "megatron_cfg": megatron}}).get)
    one = (inputs_ahead if recomputed else kept_ahead)(shape, settings)
    once = kept_before_ahead(shape, settings) + (kept_by_all(shape, settings) if recomputed else Kept())
    assert once.of(tokens) + 2 * one.of(tokens, 32) == pytest.approx(counted, rel=WITHIN)


@pytest.mark.parametrize("recomputed", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_a_layer_of_the_dtensor_policy_is_predicted(name, precision, recomputed, tmp_path):
    """The difference that one more layer makes, so that FSDP's own tensors do not count."""
    counted, dtensor = [], {"enabled": True, "activation_checkpointing": recomputed}
    for layers in (2, 3):
        write_checkpoint(name, tmp_path / str(layers), **SIZES, num_hidden_layers=layers)
        policy = built(tmp_path / str(layers), precision, {}, dtensor_cfg=dtensor)
        counted.append(kept_by_transformers(policy, rows=32))
    values = {"policy": {"precision": precision, "dtensor_cfg": dtensor, "max_total_sequence_length": 64}}
    settings = MemorySettings.read(flat(values).get)
    shape = ModelShape.read(json.loads((tmp_path / "3" / "config.json").read_text()))
    of_all, fewer = (predicted(replace(shape, layers=shape.layers[:count]), settings, 32 * 64, 32) for count in (3, 2))
    assert of_all - fewer == pytest.approx(counted[1] - counted[0], rel=0.01)


@pytest.mark.parametrize(
    ("config", "layer"),
    [(QWEN3_8B, "*-"), (QWEN3_30B_A3B, "*E"), (SUPER_120B, "M"), (SUPER_120B, "E")],
    ids=["dense", "mixture", "mamba", "latent experts"],
)
def test_tensor_and_sequence_parallel_ranks_keep_their_part_of_everything(config, layer):
    def kept_by(tensor):
        megatron = {"tensor_model_parallel_size": tensor, "sequence_parallel": True}
        values = {"policy": {"megatron_cfg": megatron}, "cluster": {"gpus_per_node": 8}}
        return kept(ModelShape.read(config), layer, MemorySettings.read(flat(values).get)).per_token

    assert kept_by(4) == pytest.approx(kept_by(1) / 4)
