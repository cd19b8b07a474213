"""What of a model decides whether a layout fits it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from nemotron_steps.config.families import FAMILIES

_SCRATCH = (
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "max_position_embeddings",
)


@dataclass(frozen=True)
class ModelSpec:
    """Counts of a decoder-only model; None where unknown.

    Attributes:
        model_type: config.json's.
        experts: of a layer; 0 for a dense model.
        mlp_width: inner size of a dense MLP; of a mixture, of one expert.
        shared_width: of a mixture, inner size of what every token goes through: the greatest common divisor, where
            there are shared experts and dense MLPs.
        mamba_heads, mamba_groups: of a Mamba-2 layer; None without any.
        bounds_time_steps: whether time_step_limit bounds those of its Mamba-2 layers.
        positions: longest sequence that its position embedding was made for, scaling included.
        rope_type: its rotary scaling.
        fixed_positions: longest sequence up to which that is the same for every sequence; None: for any.
        mtp_layers: blocks of multi-token prediction that can be trained.
        has_chat_template: whether its tokenizer has one.
        has_end_token: whether its tokenizer has a token that ends an answer.
        vocabulary: rows of its embedding.
        tokens: of its tokenizer.
        quantised: how its weights are, if they are no plain numbers.
    """

    model_type: str
    layers: int | None = None
    attention_heads: int | None = None
    key_value_heads: int | None = None
    head_dim: int | None = None
    experts: int = 0
    mlp_width: int | None = None
    shared_width: int | None = None
    mamba_heads: int | None = None
    mamba_groups: int | None = None
    bounds_time_steps: bool = False
    positions: int | None = None
    rope_type: str = "default"
    fixed_positions: int | None = None
    mtp_layers: int | None = None
    has_chat_template: bool | None = None
    has_end_token: bool | None = None
    vocabulary: int | None = None
    tokens: int | None = None
    quantised: str | None = None

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
        """Of the new model that `from_scratch.*` describes; None where it describes none.

        Args:
            get: dotted key → its value, or None.
        """
        model_type = get("from_scratch.architecture")
        if not isinstance(model_type, str):
            return None
        layers, heads, shared, head, width, positions = (get(f"from_scratch.{key}") for key in _SCRATCH)
        pattern = get("from_scratch.hybrid.pattern")
        if isinstance(pattern, str):
            return cls._of_pattern(pattern, lambda key: get(f"from_scratch.{key}"))
        sizes = {"head_dim": head, "mlp_width": width, "positions": positions, "mtp_layers": 0}
        return cls(model_type, layers, heads, shared, **sizes)

    @classmethod
    def _of_pattern(cls, pattern: str, get: Callable[[str], Any]) -> ModelSpec | None:
        """Of a new hybrid; None where its experts are not counted."""
        mixture, dense, mamba = "E" in pattern, get("intermediate_size"), "M" in pattern
        if mixture and get("hybrid.n_routed_experts") is None:
            return None
        shared = get("hybrid.moe_shared_expert_intermediate_size") if mixture else None
        if shared is not None and dense is not None and "-" in pattern:
            shared = math.gcd(shared, dense)
        return cls(
            "nemotron_h",
            layers=len(pattern),
            attention_heads=get("num_attention_heads"),
            key_value_heads=get("num_key_value_heads"),
            head_dim=get("head_dim"),
            experts=get("hybrid.n_routed_experts") if mixture else 0,
            mlp_width=get("hybrid.moe_intermediate_size") if mixture else dense,
            shared_width=shared,
            mamba_heads=get("hybrid.mamba_num_heads") if mamba else None,
            mamba_groups=get("hybrid.n_groups") if mamba else None,
            positions=get("max_position_embeddings"),
            mtp_layers=get("hybrid.num_nextn_predict_layers") if mixture else 0,
        )

    def attributes(self) -> dict[str, Any]:
        """The inverse of `from_attributes`: what will be recorded of a checkpoint of this model, where it is known."""
        found = {
            "model_type": self.model_type,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.attention_heads,
            "num_key_value_heads": self.key_value_heads,
            "head_dim": self.head_dim,
            "num_experts": self.experts or None,
            "moe_intermediate_size" if self.experts else "intermediate_size": self.mlp_width,
            "shared_expert_width": self.shared_width,
            "mamba_num_heads": self.mamba_heads,
            "mamba_groups": self.mamba_groups,
            "mtp_layers": self.mtp_layers,
            "sequence_length": self.positions,
        }
        return {name: value for name, value in found.items() if value is not None}

    @classmethod
    def from_attributes(cls, attributes: Mapping[str, Any]) -> ModelSpec | None:
        """From what is recorded of a checkpoint (artifacts/checkpoints.py); None if that does not say what it is."""
        model_type = attributes.get("model_type")
        if not isinstance(model_type, str) or ("moe" in model_type and "num_experts" not in attributes):
            return None

        def count(name: str) -> int | None:
            value = attributes.get(name)
            return value if type(value) is int else None

        experts = count("num_experts") or 0
        hybrid = model_type in FAMILIES and FAMILIES[model_type].kind == "hybrid"
        return cls(
            model_type,
            layers=count("num_hidden_layers"),
            attention_heads=count("num_attention_heads"),
            key_value_heads=count("num_key_value_heads") or count("num_attention_heads"),
            head_dim=count("head_dim"),
            experts=experts,
            mlp_width=count("moe_intermediate_size") if experts else count("intermediate_size"),
            shared_width=count("shared_expert_width"),
            mamba_heads=count("mamba_num_heads"),
            mamba_groups=count("mamba_groups"),
            bounds_time_steps=attributes.get("bounded_time_steps") is True,
            positions=count("sequence_length"),
            rope_type=str(attributes.get("rope_type", "default")),
            fixed_positions=count("fixed_positions"),
            mtp_layers=count("mtp_layers") if hybrid else 0,
            # A tokenizer that was looked at and a template that was not found: there is none.
            has_chat_template="chat_template" in attributes if "tokenizer" in attributes else None,
            has_end_token=attributes.get("has_end_token") if "tokenizer" in attributes else None,
            vocabulary=count("vocab_size"),
            tokens=count("tokenizer_size"),
            quantised=attributes.get("quantised"),
        )
