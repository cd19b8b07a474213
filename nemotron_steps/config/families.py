"""The families of models that can be converted, trained and generated from: one row each.

Manifests (`model_type = "@families"`), the planner, the models and the docs read this table. A new family is a row here
and a module in models/families/, or a row alone where it is like one that is there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Rotary position scalings that the megatron policy and the embedded generator compute."""


@dataclass(frozen=True)
class Family:
    """A family of models.

    Attributes:
        name: config.json's `model_type`.
        kind: dense, or with a mixture of experts in every layer, or hybrid: layers of several kinds, one mixer each.
        module: of models/families, that reads its config.json and knows its parameters.
    """

    name: str
    kind: Literal["dense", "mixture", "hybrid"]
    module: str


FAMILIES = {
    family.name: family
    for family in (
        Family("llama", "dense", "decoder"),
        Family("qwen2", "dense", "decoder"),
        Family("qwen3", "dense", "decoder"),
        Family("qwen3_moe", "mixture", "decoder"),
        Family("nemotron_h", "hybrid", "nemotron_h"),
    )
}


def rope_type(config: Mapping[str, Any]) -> tuple[str, int | None]:
    """The rotary scaling of a config.json, and the longest sequence up to which its frequencies are the same for every
    sequence; None: for any. transformers takes others for all rows of a batch that has a longer one."""
    stated = config.get("rope_parameters") or config.get("rope_scaling")
    found = "default"
    # Of some families each kind of layer has its own.
    for each in (stated, *stated.values()) if isinstance(stated, Mapping) else ():
        kind = (each.get("rope_type") or each.get("type")) if isinstance(each, Mapping) else None
        found = kind if isinstance(kind, str) else found
        if "dynamic" in found or found in ("longrope", "su"):
            longest = config.get("max_position_embeddings")
            if "dynamic" not in found:
                key = "original_max_position_embeddings"
                longest = each.get(key) or config.get(key) or longest
            return found, longest if type(longest) is int else None
    return found, None
