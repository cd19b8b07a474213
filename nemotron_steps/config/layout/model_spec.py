"""What of a model decides whether a layout fits it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from nemotron_steps.config.families import FAMILIES
from nemotron_steps.config.layout.parallel_config import at, keys_of, values_at


@dataclass(frozen=True)
class ModelSpec:
    """Counts of a decoder-only model; None where unknown.

    Attributes:
        mlp_width: inner size of a dense MLP; of a mixture, of one expert.
        shared_width: of a mixture, inner size of what every token goes through: the greatest common divisor, where
            there are shared experts and dense MLPs.
        positions: longest sequence that its position embedding was made for, scaling included.
        fixed_positions: longest sequence up to which rotary scaling is the same for every sequence; None: for any.
        mtp_layers: blocks of multi-token prediction that can be trained.
        vocabulary, tokens: rows of its embedding, tokens of its tokenizer.
        quantised: how its weights are, if they are no plain numbers.
    """

    model_type: str
    layers: int | None = at("num_hidden_layers", None)
    attention_heads: int | None = at("num_attention_heads", None)
    key_value_heads: int | None = at("num_key_value_heads", None)
    head_dim: int | None = at("head_dim", None)
    experts: int = at("num_experts", 0)
    mlp_width: int | None = None
    shared_width: int | None = at("shared_expert_width", None)
    mamba_heads: int | None = at("mamba_num_heads", None)
    mamba_groups: int | None = at("mamba_groups", None)
    bounds_time_steps: bool = at("bounded_time_steps", False)
    positions: int | None = at("sequence_length", None)
    rope_type: str = at("rope_type", "default")
    fixed_positions: int | None = at("fixed_positions", None)
    mtp_layers: int | None = at("mtp_layers", None)
    has_chat_template: bool | None = None
    has_end_token: bool | None = None
    vocabulary: int | None = at("vocab_size", None)
    tokens: int | None = at("tokenizer_size", None)
    quantised: str | None = at("quantised", None)

    @property
    def is_moe(self) -> bool:
        """Whether its MLPs are mixtures of experts."""
        return self.experts > 0

    @property
    def is_hybrid(self) -> bool:
        """Whether its layers have one mixer each, and a pipeline stage may have any number of them."""
        return self.model_type in FAMILIES and FAMILIES[self.model_type].kind == "hybrid"

    @classmethod
    def from_scratch(cls, get: Callable[[str], Any]) -> ModelSpec | None:
        """Of the new model that `from_scratch.*` of a config describes; None where it describes none, or a hybrid whose
        experts are not counted."""
        model_type = get("from_scratch.architecture")
        if not isinstance(model_type, str):
            return None

        def of(key: str) -> Any:
            return get(f"from_scratch.{key}")

        own = {
            "attention_heads": of("num_attention_heads"),
            "key_value_heads": of("num_key_value_heads"),
            "head_dim": of("head_dim"),
            "mlp_width": of("intermediate_size"),
            "positions": of("max_position_embeddings"),
        }
        pattern = of("hybrid.pattern")
        if not isinstance(pattern, str):
            return cls(model_type, of("num_hidden_layers"), mtp_layers=0, **own)
        own["layers"], own["mtp_layers"] = len(pattern), 0
        if "M" in pattern:
            own |= {"mamba_heads": of("hybrid.mamba_num_heads"), "mamba_groups": of("hybrid.n_groups")}
        if "E" in pattern:
            shared, dense = of("hybrid.moe_shared_expert_intermediate_size"), own["mlp_width"]
            both = shared is not None and dense is not None and "-" in pattern
            own |= {
                "experts": of("hybrid.n_routed_experts"),
                "mlp_width": of("hybrid.moe_intermediate_size"),
                "shared_width": math.gcd(shared, dense) if both else shared,
                "mtp_layers": of("hybrid.num_nextn_predict_layers"),
            }
        return None if own.get("experts", 0) is None else cls("nemotron_h", **own)

    def attributes(self) -> dict[str, Any]:
        """The inverse of `from_attributes`: what will be recorded of a checkpoint of this model, where it is known."""
        width = {"moe_intermediate_size" if self.experts else "intermediate_size": self.mlp_width}
        own = {key: getattr(self, name) for name, key in keys_of(type(self)).items()}
        plain = {each.metadata["key"]: each.default for each in fields(self) if "key" in each.metadata}
        found = {"model_type": self.model_type, **own, **width}
        return {name: value for name, value in found.items() if value != plain.get(name)}

    @classmethod
    def from_attributes(cls, attributes: Mapping[str, Any]) -> ModelSpec | None:
        """From what is recorded of a checkpoint (artifacts/checkpoints.py); None if that does not say what it is."""
        model_type = attributes.get("model_type")
        if not isinstance(model_type, str) or ("moe" in model_type and "num_experts" not in attributes):
            return None
        values = values_at(cls, attributes.get)
        values.setdefault("key_value_heads", values.get("attention_heads"))
        width = attributes.get("moe_intermediate_size" if values.get("experts") else "intermediate_size")
        values["mlp_width"] = width if type(width) is int else None
        if model_type not in FAMILIES or FAMILIES[model_type].kind != "hybrid":
            values["mtp_layers"] = 0
        if "tokenizer" in attributes:  # that was looked at; a template that was not found is not there
            values["has_chat_template"] = "chat_template" in attributes
            values["has_end_token"] = attributes.get("has_end_token")
        return cls(model_type, **values)
