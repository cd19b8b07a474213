"""Nemotron-H (Nemotron Nano 2, Nemotron 3 Nano and Super): hybrids of Mamba-2, attention, MLPs and experts.

Both generations of config files are read: the older ones write the layers as one string (`hybrid_override_pattern`),
those of transformers 5 as a list of names (`layers_block_type`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from nemotron_steps.errors import ArtifactError, UnsupportedError
from nemotron_steps.models.architecture import Architecture, Mamba2

KINDS = {"M": "Mamba-2", "E": "experts", "*": "attention", "-": "MLP"}
_BLOCK_TYPES = {
    "linear_attention": "M",
    "mamba": "M",
    "moe": "E",
    "full_attention": "*",
    "attention": "*",
    "mlp": "-",
}
_BIASES = ("use_bias", "mamba_proj_bias", "mlp_bias", "attention_bias")


def read(config: Mapping[str, Any], where: str) -> Architecture:
    """The architecture that a parsed config.json describes.

    Raises:
        UnsupportedError: the model needs something this package does not compute.
        ArtifactError: a required key is missing or malformed, or two of them do not go together.
    """
    _refuse_unsupported(config, where)
    try:
        pattern = _pattern(config, "hybrid_override_pattern", "layers_block_type", where)
        if not pattern:
            raise KeyError("layers_block_type (or hybrid_override_pattern)")
        layers = config.get("num_hidden_layers")
        if layers is not None and int(layers) != len(pattern):
            raise ArtifactError(
                "the layer pattern has another length than num_hidden_layers",
                where=where,
                expected=f"{int(layers)} layers",
                found=f"{len(pattern)}: {pattern}",
                hints=(f"set num_hidden_layers to {len(pattern)} in config.json, or mend the pattern",),
            )
        mtp_layers = int(config.get("num_nextn_predict_layers") or 0)
        mtp_pattern = _pattern(config, "mtp_hybrid_override_pattern", "mtp_layers_block_type", where) or "*E"
        experts = "E" in pattern or ("E" in mtp_pattern and mtp_layers > 0)
        heads = int(config["num_attention_heads"])
        architecture = Architecture(
            family="nemotron_h",
            hidden_size=int(config["hidden_size"]),
            num_layers=len(pattern),
            num_attention_heads=heads,
            num_key_value_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or int(config["hidden_size"]) // heads),
            ffn_hidden_size=int(config["intermediate_size"]),
            vocab_size=int(config["vocab_size"]),
            rope_theta=float(config.get("rope_theta") or 10000.0),
            norm_eps=float(config.get("layer_norm_epsilon", 1e-5)),
            max_position_embeddings=int(config["max_position_embeddings"]),
            # Neither transformers nor vLLM ties these, whatever tie_word_embeddings says: lm_head is always there.
            tied_embeddings=False,
            initializer_range=float(config.get("initializer_range", 0.02)),
            num_experts=_count(config, "n_routed_experts", "num_local_experts") if experts else 0,
            experts_per_token=int(config["num_experts_per_tok"]) if experts else 0,
            moe_ffn_hidden_size=int(config["moe_intermediate_size"]) if experts else 0,
            norm_topk_prob=bool(config.get("norm_topk_prob", True)),
            router_bias=experts,
            pattern=pattern,
            mamba=_mamba(config, where) if "M" in pattern else None,
            activation="relu2",
            rotary=False,
            router_score="sigmoid",
            router_groups=int(config.get("n_group") or 1) if experts else 1,
            router_top_groups=int(config.get("topk_group") or 1) if experts else 1,
            routed_scaling_factor=float(config.get("routed_scaling_factor", 1.0)) if experts else 1.0,
            shared_ffn_hidden_size=int(config["moe_shared_expert_intermediate_size"]) if experts else 0,
            moe_latent_size=int(config.get("moe_latent_size") or 0) if experts else 0,
            mtp_pattern=mtp_pattern if mtp_layers else "",
            mtp_layers=mtp_layers,
        )
    except KeyError as error:
        raise ArtifactError(f"config.json lacks {error.args[0]}", where=where) from error
    except (TypeError, ValueError) as error:
        if isinstance(error, ArtifactError):
            raise
        raise ArtifactError("config.json has a malformed value", where=where, found=str(error)) from error
    _refuse_uneven(architecture, where)
    return architecture


def _pattern(config: Mapping[str, Any], as_string: str, as_list: str, where: str) -> str:
    """One letter a layer, from whichever of the two keys there is; empty where neither is."""
    names = config.get(as_list)
    if names is not None:
        unknown = sorted({str(name) for name in names if name not in _BLOCK_TYPES})
        if unknown:
            known = " | ".join(_BLOCK_TYPES)
            raise ArtifactError(
                f"{as_list} names layers that do not exist", where=where, expected=known, found=", ".join(unknown)
            )
        return "".join(_BLOCK_TYPES[name] for name in names)
    pattern = str(config.get(as_string) or "")
    letters = sorted(set(pattern) - set(KINDS))
    if letters:
        known = ", ".join(f"{letter} {kind}" for letter, kind in KINDS.items())
        raise ArtifactError(
            f"{as_string} has letters that stand for no layer",
            where=where,
            expected=known,
            found=f"{' '.join(letters)} in {pattern}",
        )
    return pattern


def _mamba(config: Mapping[str, Any], where: str) -> Mamba2:
    least, most = (_bound(value) for value in config.get("time_step_limit") or (0.0, math.inf))
    return Mamba2(
        num_heads=int(config["mamba_num_heads"]),
        head_dim=int(config["mamba_head_dim"]),
        state_size=int(config["ssm_state_size"]),
        num_groups=_count(config, "n_groups", "mamba_n_groups"),
        conv_kernel=_count(config, "conv_kernel", "mamba_d_conv"),
        chunk_size=_count(config, "chunk_size", "mamba_chunk_size"),
        time_step_limit=(least, most),
        conv_bias=bool(config.get("use_conv_bias", True)),
    )


def _count(config: Mapping[str, Any], *names: str) -> int:
    """The value of the first of these keys that is there."""
    for name in names:
        if config.get(name) is not None:
            return int(config[name])
    raise KeyError(names[0])


def _bound(value: Any) -> float:
    """A number; transformers 5 writes infinity as {"__float__": "Infinity"}, JSON having none."""
    return float(value["__float__"] if isinstance(value, Mapping) else value)


def _refuse_unsupported(config: Mapping[str, Any], where: str) -> None:
    for key, only in (("mlp_hidden_act", "relu2"), ("mamba_hidden_act", "silu")):
        if config.get(key, only) != only:
            raise UnsupportedError(
                f"this {key} is not implemented for nemotron_h", where=where, expected=only, found=str(config[key])
            )
    for key in (*_BIASES, "residual_in_fp32", "sliding_window"):
        if config.get(key):
            raise UnsupportedError(
                f"{key} is not implemented for nemotron_h", where=where, expected="false", found=str(config[key])
            )
    if config.get("n_shared_experts", 1) != 1:
        raise UnsupportedError(
            "only one shared expert is implemented", where=where, expected="1", found=str(config["n_shared_experts"])
        )


def _refuse_uneven(architecture: Architecture, where: str) -> None:
    """Counts of one model that must divide each other."""
    uneven = [
        ("attention heads", architecture.num_attention_heads, "key-value heads", architecture.num_key_value_heads)
    ]
    if architecture.mamba is not None:
        uneven.append(("Mamba heads", architecture.mamba.num_heads, "groups", architecture.mamba.num_groups))
    if architecture.is_moe:
        uneven.append(("experts", architecture.num_experts, "router groups", architecture.router_groups))
    for many, count, few, of in uneven:
        if of < 1 or count % of:
            raise ArtifactError(
                f"{many} do not divide evenly over {few}",
                where=where,
                expected=f"a multiple of {of}",
                found=str(count),
            )
