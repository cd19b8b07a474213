"""The families of models that can be converted, trained and generated from: one row each.

Manifests (`model_type = "@families"`), the planner, the models and the docs read this table. A new family is a row here
and a module in models/families/, or a row alone where it is like one that is there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


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
