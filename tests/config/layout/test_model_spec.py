"""What of a model a layout depends on, of what is recorded of a checkpoint and of a new model's config."""

from typing import Any

import pytest

from nemotron_steps.config.layout.model_spec import ModelSpec

RECORDED: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 4,
    "moe_intermediate_size": 24,
    "intermediate_size": 96,
    "shared_expert_width": 40,
    "sequence_length": 512,
    "mtp_layers": 1,
    "vocab_size": 300,
    "tokenizer": "digest",
    "tokenizer_size": 290,
    "chat_template": "digest",
    "has_end_token": True,
}
SCRATCH: dict[str, Any] = {
    "architecture": "qwen3",
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
}
HYBRID = {
    "n_routed_experts": 4,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 40,
    "mamba_num_heads": 6,
    "n_groups": 3,
    "num_nextn_predict_layers": 1,
}


def recorded(**changes: Any) -> ModelSpec | None:
    return ModelSpec.from_attributes({k: v for k, v in {**RECORDED, **changes}.items() if v is not ...})


def test_every_fact_is_of_its_own_attribute() -> None:
    assert recorded() == ModelSpec(
        "qwen3_moe", layers=3, attention_heads=8, key_value_heads=2, head_dim=16, experts=4, mlp_width=24,
        shared_width=40, positions=512, mtp_layers=0, has_chat_template=True, has_end_token=True, vocabulary=300,
        tokens=290,
    )  # fmt: skip
    hybrid = recorded(model_type="nemotron_h", mamba_num_heads=6, mamba_groups=3, bounded_time_steps=True)
    assert hybrid is not None and hybrid.is_hybrid
    assert (hybrid.mamba_heads, hybrid.mamba_groups, hybrid.mtp_layers, hybrid.bounds_time_steps) == (6, 3, 1, True)


@pytest.mark.parametrize(
    ("changes", "fact", "value"),
    [
        ({"num_experts": 0}, "mlp_width", 96),
        ({"num_key_value_heads": ...}, "key_value_heads", 8),
        ({"chat_template": ...}, "has_chat_template", False),
        ({"chat_template": ..., "tokenizer": ...}, "has_chat_template", None),
        ({"tokenizer": ...}, "has_end_token", None),
        ({"model_type": "nemotron_h", "mtp_layers": ...}, "mtp_layers", None),
    ],
)
def test_what_is_not_recorded_is_not_known(changes: dict[str, Any], fact: str, value: Any) -> None:
    assert getattr(recorded(**changes), fact) == value


def new(hybrid: dict[str, Any] | None = None, **changes: Any) -> ModelSpec | None:
    values = {f"from_scratch.{key}": value for key, value in {**SCRATCH, **changes}.items()}
    values |= {f"from_scratch.hybrid.{key}": value for key, value in (hybrid or {}).items()}
    return ModelSpec.from_scratch(values.get)


@pytest.mark.parametrize("pattern", [None, "M*", "*-", "ME", "E-*"])
def test_what_will_be_recorded_of_a_new_model_has_its_facts(pattern: str | None) -> None:
    model = new() if pattern is None else new({**HYBRID, "pattern": pattern}, architecture="nemotron_h")
    assert model is not None
    assert ModelSpec.from_attributes(model.attributes()) == model
