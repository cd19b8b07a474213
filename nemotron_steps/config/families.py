"""The families of models that can be converted, trained and generated from: one row each.

Manifests (`model_type = "@families"`), the planner, the models and the docs read this table. A new family is a row here
and a module in models/families/, or a row alone where it is like one that is there.
"""

import json
import math
from collections.abc import Iterator, Mapping
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

QK_NORM, QKV_BIAS = ("qwen3", "qwen3_moe"), ("qwen2",)
"""Families whose query and key heads are normed, and whose projections to them have biases."""
_ABSENT = {
    "num_key_value_heads": {"qwen2": 32, "qwen3": 32, "qwen3_moe": 4, "nemotron_h": 8},
    "head_dim": {"qwen3": 128, "nemotron_h": 128},
}


def if_absent(config: Mapping[str, Any], key: str, worked_out: int) -> int:
    """What transformers takes where config.json has no such key; for null, and in other families, it works it out."""
    return worked_out if key in config else _ABSENT[key].get(str(config["model_type"]), worked_out)


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


# -- layers of a hybrid

KINDS = {"M": "Mamba-2", "E": "experts", "*": "attention", "-": "MLP"}
NAMES = {"M": ("linear_attention", "mamba"), "E": ("moe",), "*": ("full_attention", "attention"), "-": ("mlp",)}
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
    """Least and greatest time step of Mamba-2, after softplus; 0 and infinity where nothing bounds them."""
    stated = config.get("mamba_dt_limit") or config.get("time_step_limit") or (0.0, math.inf)
    # transformers 5 writes infinity as {"__float__": "Infinity"}, JSON having none.
    least, most = (float(value["__float__"] if isinstance(value, Mapping) else value) for value in stated)
    return least, most


def bounds_time_steps(limit: tuple[float, float]) -> bool:
    """Whether softplus alone does not keep to it."""
    return limit[0] > 0 or limit[1] < math.inf


# -- sizes

_SIZES = {
    "": ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size"),
    "dense": ("intermediate_size",),
    "mixture": ("num_local_experts", "num_experts", "num_experts_per_tok", "moe_intermediate_size"),
    "M": ("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel", "chunk_size"),
    "E": ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "moe_shared_expert_intermediate_size"),
}
"""Kind of a family, or letter of a layer → sizes that it needs; those that a model has no part for may be anything."""
_LISTED = ("num_hidden_layers", "num_local_experts", "num_experts", "n_routed_experts")
LARGEST = 2**31 - 1
"""More than any size of a model."""
LISTED = 2**14
"""At most so many layers, or experts, each of which has tensors with names of its own."""


def misdescribed(shape: Mapping[str, Any], kind: str) -> Iterator[tuple[str, str, str]]:
    """What no model of a kind can be, of its config.json's keys: what is wrong, what would be right, what is there."""
    parts = ["", kind]
    if kind == "hybrid":
        pattern, layers = pattern_of(shape), shape.get("num_hidden_layers")
        parts = ["", *(letter for letter in "ME" if letter in pattern)]
        if UNKNOWN in pattern:
            kinds = ", ".join(f"{letter} {kind}" for letter, kind in KINDS.items())
            stated = shape.get("layers_block_type")
            yield "layers of a kind that does not exist", kinds, str(stated or shape.get("hybrid_override_pattern"))
        elif pattern and type(layers) is int and layers != len(pattern):
            what = "a layer pattern of another length than num_hidden_layers"
            yield what, f"{layers} layers", f"{len(pattern)}: {pattern}"
    for part in parts:
        for key in _SIZES[part]:
            value, most = shape.get(key), LISTED if key in _LISTED else LARGEST
            if value is not None and (type(value) is not int or not 0 < value <= most):
                article = "an" if key.startswith(("n_", "i")) else "a"
                what = f"{article} {key} that is not a count"
                yield what, f"a whole number from 1 to {most}", json.dumps(value)[:40]
    tied = shape.get("tie_word_embeddings")
    if not isinstance(tied, bool | None):
        yield "a tie_word_embeddings that is not true or false", "true or false", json.dumps(tied)[:40]
