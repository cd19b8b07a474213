"""The kinds of layers that hybrids are made of: one letter each, and how both generations of config.json write them.

Older files have one string (`hybrid_override_pattern`), those of transformers 5 a list of names (`layers_block_type`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

KINDS = {"M": "Mamba-2", "E": "experts", "*": "attention", "-": "MLP"}
NAMES = {
    "M": ("linear_attention", "mamba"),
    "E": ("moe",),
    "*": ("full_attention", "attention"),
    "-": ("mlp",),
}
"""Letter → its names in a list; transformers writes the first."""
LETTERS = {name: letter for letter, names in NAMES.items() for name in names}
UNKNOWN = "?"


def pattern_of(
    config: Mapping[str, Any], listed: str = "layers_block_type", written: str = "hybrid_override_pattern"
) -> str:
    """One letter a layer, UNKNOWN for a layer of no kind that there is; empty where config.json has neither key."""
    names = config.get(listed)
    if isinstance(names, list | tuple):
        return "".join(LETTERS.get(str(name), UNKNOWN) for name in names)
    pattern = config.get(written)
    return "".join(letter if letter in KINDS else UNKNOWN for letter in pattern) if isinstance(pattern, str) else ""
