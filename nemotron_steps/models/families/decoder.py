"""Decoders of equal layers, attention and then an MLP or experts: Llama, Qwen2, Qwen3 and Qwen3-MoE."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from nemotron_steps.errors import UnsupportedError
from nemotron_steps.models.architecture import Architecture, RopeScaling
from nemotron_steps.models.families.config_values import ConfigValues
from nemotron_steps.models.mapping import Layout, Parameter

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
CARRIED = ""
_QK_NORM = ("qwen3", "qwen3_moe")


def read(config: Mapping[str, Any], where: str) -> Architecture:
    """The architecture of a parsed config.json, old (`rope_theta`) or new (`rope_parameters`) style.

    Raises:
        UnsupportedError: the model needs something this package does not compute.
        ArtifactError: a required key is missing or malformed.
    """
    family = str(config["model_type"])
    _refuse_unsupported(config, family, where)
    try:
        heads = int(config["num_attention_heads"])
        hidden = int(config["hidden_size"])
        rope_theta, rope_scaling = _read_rope(config, where)
        moe = family == "qwen3_moe"
        # transformers 4 says num_experts, transformers 5 num_local_experts.
        experts = int(config.get("num_local_experts") or config["num_experts"]) if moe else 0
        return Architecture(
            family=family,
            hidden_size=hidden,
            num_layers=int(config["num_hidden_layers"]),
            num_attention_heads=heads,
            num_key_value_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
            ffn_hidden_size=int(config["intermediate_size"]),
            vocab_size=int(config["vocab_size"]),
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            max_position_embeddings=int(config["max_position_embeddings"]),
            qk_norm=family in _QK_NORM,
            qkv_bias=family == "qwen2",
            tied_embeddings=bool(config.get("tie_word_embeddings", False)),
            initializer_range=float(config.get("initializer_range", 0.02)),
            num_experts=experts,
            experts_per_token=int(config["num_experts_per_tok"]) if moe else 0,
            moe_ffn_hidden_size=int(config["moe_intermediate_size"]) if moe else 0,
            norm_topk_prob=bool(config.get("norm_topk_prob", False)),
        )
    except KeyError as error:
        values = ConfigValues(config, where)
        raise values.refusal(f"config.json lacks {error.args[0]}", str(error.args[0]), "no such key") from error
    except (TypeError, ValueError) as error:
        values = ConfigValues(config, where)
        raise values.refusal("config.json has a malformed value", "what transformers writes", str(error)) from error


def parameters(architecture: Architecture) -> Iterator[Parameter]:
    """Every parameter of the model, in the order of the layers."""
    vocabulary = (architecture.vocab_size, architecture.hidden_size)
    yield Parameter("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), (vocabulary,), tp_dim=0)
    for layer in range(architecture.num_layers):
        yield from _layer_parameters(architecture, layer)
    yield Parameter("decoder.final_layernorm.weight", ("model.norm.weight",), ((architecture.hidden_size,),))
    if not architecture.tied_embeddings:
        yield Parameter("output_layer.weight", ("lm_head.weight",), (vocabulary,), tp_dim=0)


def _layer_parameters(architecture: Architecture, layer: int) -> Iterator[Parameter]:
    ours, theirs = f"decoder.layers.{layer}", f"model.layers.{layer}"
    attention = f"{theirs}.self_attn"
    hidden, width = architecture.hidden_size, architecture.head_dim
    queries, keys = architecture.num_attention_heads * width, architecture.num_key_value_heads * width

    def qkv(kind: str, *columns: int) -> Parameter:
        names = tuple(f"{attention}.{part}_proj.{kind}" for part in "qkv")
        shapes = tuple((rows, *columns) for rows in (queries, keys, keys))
        return Parameter(f"{ours}.self_attention.linear_qkv.{kind}", names, shapes, Layout.QKV, 0, layer)

    def copied(
        name: str, hf_name: str, *shape: int, tp_dim: int | None = None, key: str = "", optional: bool = False
    ) -> Parameter:
        key = f"{ours}.{key}" if key else ""
        return Parameter(
            f"{ours}.{name}", (f"{theirs}.{hf_name}",), (shape,), Layout.COPY, tp_dim, layer, optional, key=key
        )

    yield copied(
        "input_layernorm.weight",
        "input_layernorm.weight",
        hidden,
        key="self_attention.linear_qkv.layer_norm_weight",
    )
    yield qkv("weight", hidden)
    if architecture.qkv_bias:
        yield qkv("bias")
    if architecture.qk_norm:
        yield copied("self_attention.q_layernorm.weight", "self_attn.q_norm.weight", width)
        yield copied("self_attention.k_layernorm.weight", "self_attn.k_norm.weight", width)
    yield copied("self_attention.linear_proj.weight", "self_attn.o_proj.weight", hidden, queries, tp_dim=1)
    yield copied(
        "pre_mlp_layernorm.weight",
        "post_attention_layernorm.weight",
        hidden,
        key="" if architecture.is_moe else "mlp.linear_fc1.layer_norm_weight",
    )
    if not architecture.is_moe:
        inner = architecture.ffn_hidden_size
        gate_up = (f"{theirs}.mlp.gate_proj.weight", f"{theirs}.mlp.up_proj.weight")
        shapes = ((inner, hidden), (inner, hidden))
        yield Parameter(f"{ours}.mlp.linear_fc1.weight", gate_up, shapes, Layout.GATE_UP, 0, layer)
        yield copied("mlp.linear_fc2.weight", "mlp.down_proj.weight", hidden, inner, tp_dim=1)
        return
    yield copied("mlp.router.weight", "mlp.gate.weight", architecture.num_experts, hidden)
    if architecture.router_bias:
        # No public Qwen3-MoE checkpoint has one; the name is that of the families that do.
        name = "mlp.gate.e_score_correction_bias"
        yield copied("mlp.router.expert_bias", name, architecture.num_experts, optional=True)
    inner = architecture.moe_ffn_hidden_size
    experts = [f"{theirs}.mlp.experts.{expert}" for expert in range(architecture.num_experts)]
    gates_and_ups = tuple(f"{expert}.{part}_proj.weight" for expert in experts for part in ("gate", "up"))
    inner_rows = ((inner, hidden),) * len(gates_and_ups)
    yield Parameter(
        f"{ours}.mlp.experts.linear_fc1.weight", gates_and_ups, inner_rows, Layout.EXPERTS_GATE_UP, layer=layer
    )
    down = tuple(f"{expert}.down_proj.weight" for expert in experts)
    hidden_rows = ((hidden, inner),) * len(down)
    yield Parameter(f"{ours}.mlp.experts.linear_fc2.weight", down, hidden_rows, Layout.EXPERTS, layer=layer)


def _read_rope(config: Mapping[str, Any], where: str) -> tuple[float, RopeScaling | None]:
    parameters = dict(config.get("rope_parameters") or {})
    if not parameters:
        parameters = dict(config.get("rope_scaling") or {})
        parameters.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    theta = float(parameters.pop("rope_theta", 10000.0))
    rope_type = parameters.pop("rope_type", None) or parameters.pop("type", None) or "default"
    parameters.pop("type", None)
    if rope_type not in ROPE_TYPES:
        raise UnsupportedError(
            "this rotary scaling is not implemented", where=where, expected=" | ".join(ROPE_TYPES), found=str(rope_type)
        )
    if parameters.pop("partial_rotary_factor", 1.0) != 1.0 or config.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedError("partial rotary embeddings are not implemented", where=where)
    if rope_type == "default":
        return theta, None
    known = {name: value for name, value in parameters.items() if name in RopeScaling.__dataclass_fields__}
    unknown = sorted(set(parameters) - set(known))
    if unknown:
        raise UnsupportedError("unknown rotary scaling parameters", where=where, found=", ".join(unknown))
    if known.get("original_max_position_embeddings") is None:
        known["original_max_position_embeddings"] = int(config["max_position_embeddings"])
    return theta, RopeScaling(rope_type=rope_type, **known)


def _refuse_unsupported(config: Mapping[str, Any], family: str, where: str) -> None:
    if config.get("hidden_act", "silu") != "silu":
        raise UnsupportedError("only SiLU MLPs are implemented", where=where, found=str(config["hidden_act"]))
    for key in ("attention_bias", "mlp_bias", "use_sliding_window"):
        if config.get(key):
            raise UnsupportedError(
                f"{key} is not implemented for {family}", where=where, expected="false", found="true"
            )
    if any(kind != "full_attention" for kind in config.get("layer_types") or ()):
        raise UnsupportedError("only full attention layers are implemented", where=where)
    if config.get("decoder_sparse_step", 1) != 1 or config.get("mlp_only_layers"):
        raise UnsupportedError("mixtures of experts must be in every layer", where=where)
