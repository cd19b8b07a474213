"""What a hybrid's config.json says of its layers: their kinds, a letter each, and what bounds their time steps.

Older files have one string (`hybrid_override_pattern`), those of transformers 5 a list of names (`layers_block_type`).
"""

from __future__ import annotations

import math
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


def time_step_limit(config: Mapping[str, Any]) -> tuple[float, float]:
    """Least and greatest time step of Mamba-2, after softplus; 0 and infinity where nothing bounds them.

    Raises:
        KeyError, TypeError, ValueError, OverflowError: it is not two numbers.
    """
    stated = config.get("mamba_dt_limit") or config.get("time_step_limit") or (0.0, math.inf)
    least, most = (_number(value) for value in stated)
    return least, most


def bounds_time_steps(limit: tuple[float, float]) -> bool:
    """Whether softplus alone does not keep to it."""
    return limit[0] > 0 or limit[1] < math.inf


def _number(value: Any) -> float:
    """transformers 5 writes infinity as {"__float__": "Infinity"}, JSON having none."""
    return float(value["__float__"] if isinstance(value, Mapping) else value)
