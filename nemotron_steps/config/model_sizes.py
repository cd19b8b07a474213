"""Sizes that a config.json may say of a model, of any family: counts that a plan and whoever loads it refuse."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from nemotron_steps.config.hybrid_layers import KINDS, UNKNOWN, pattern_of

_COUNTS = {
    "": ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size"),
    "M": ("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel", "chunk_size"),
    "E": (
        "n_routed_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "moe_shared_expert_intermediate_size",
    ),
}
"""Letter of a layer → the sizes that it needs; those of kinds that a model has no layer of may say anything."""
_COUNTS_OF_KINDS = {
    "dense": ("intermediate_size",),
    "mixture": ("num_local_experts", "num_experts", "num_experts_per_tok", "moe_intermediate_size"),
}
"""Kind of a family whose layers are all equal → the sizes that they need beside those of every model."""
_LISTED = ("num_hidden_layers", "num_local_experts", "num_experts", "n_routed_experts")
LARGEST = 2**31 - 1
"""More than any size of a model."""
LISTED = 2**14
"""At most so many layers, or experts, each of which has tensors with names of its own."""


def misdescribed(shape: Mapping[str, Any], kind: str) -> Iterator[tuple[str, str, str]]:
    """What no model can be: what is wrong, what would be right, what is there.

    Args:
        shape: keys of its config.json, or as many as are recorded of a checkpoint.
        kind: of its family (config/families.py).
    """
    if kind != "hybrid":
        yield from _miscounted(shape, (*_COUNTS[""], *_COUNTS_OF_KINDS[kind]))
        tied = shape.get("tie_word_embeddings")
        if not isinstance(tied, bool | None):
            yield "a tie_word_embeddings that is no truth value", "true or false", json.dumps(tied)[:40]
        return
    pattern, layers = pattern_of(shape), shape.get("num_hidden_layers")
    if UNKNOWN in pattern:
        kinds = ", ".join(f"{letter} {kind}" for letter, kind in KINDS.items())
        stated = shape.get("layers_block_type")
        yield "layers of a kind that does not exist", kinds, str(stated or shape.get("hybrid_override_pattern"))
    elif pattern and type(layers) is int and layers != len(pattern):
        yield (
            "a layer pattern of another length than num_hidden_layers",
            f"{layers} layers",
            f"{len(pattern)}: {pattern}",
        )
    yield from _miscounted(shape, [key for letter, keys in _COUNTS.items() if letter in pattern for key in keys])


def _miscounted(shape: Mapping[str, Any], keys: Iterable[str]) -> Iterator[tuple[str, str, str]]:
    for key in keys:
        value, most = shape.get(key), LISTED if key in _LISTED else LARGEST
        if value is not None and (type(value) is not int or not 0 < value <= most):
            yield (
                f"{'an' if key.startswith(('n_', 'i')) else 'a'} {key} that is no count",
                f"a whole number from 1 to {most}",
                json.dumps(value)[:40],
            )
