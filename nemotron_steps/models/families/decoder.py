"""Decoders of equal layers, attention and then an MLP or experts: Llama, Qwen2, Qwen3 and Qwen3-MoE."""

from collections.abc import Iterator, Mapping
from typing import Any

from nemotron_steps.config.families import LISTED, QK_NORM, QKV_BIAS, ROPE_TYPES, if_absent
from nemotron_steps.errors import UnsupportedError
from nemotron_steps.models.architecture import Architecture, RopeScaling
from nemotron_steps.models.families import ConfigValues
from nemotron_steps.models.mapping import Parameter, Place, attention, experts, mlp

CARRIED = ""
_SCALED = {"linear": ("factor",), "yarn": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor")}
"""Rotary scaling → parameters that it does not go without."""
_ROPE_BESIDES = {"rope_theta", "type", "partial_rotary_factor"}
"""Keys of rotary parameters beside those of their scaling."""


def read(config: Mapping[str, Any], where: str) -> Architecture:
    """See Architecture.from_config."""
    family = str(config["model_type"])
    values = ConfigValues(config, where)
    _refuse_unsupported(config, family, values, where)
    moe = family == "qwen3_moe"
    hidden, heads = values.count("hidden_size"), values.count("num_attention_heads")
    rope_theta, rope_scaling = _read_rope(config, values, where)

    architecture = Architecture(
        family=family,
        hidden_size=hidden,
        num_layers=values.count("num_hidden_layers", most=LISTED),
        num_attention_heads=heads,
        num_key_value_heads=values.count(
            "num_key_value_heads", default=if_absent(config, "num_key_value_heads", heads)
        ),
        head_dim=values.count("head_dim", default=if_absent(config, "head_dim", hidden // heads)),
        ffn_hidden_size=values.count("intermediate_size", least=int(not moe)),
        vocab_size=values.count("vocab_size"),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        norm_eps=values.number("rms_norm_eps", 1e-6, least=0, nullable=False),
        max_position_embeddings=values.count("max_position_embeddings"),
        qk_norm=family in QK_NORM,
        qkv_bias=family in QKV_BIAS,
        tied_embeddings=values.flag("tie_word_embeddings", default=False),
        initializer_range=values.number("initializer_range", 0.02, least=0, nullable=False),
        # transformers 4 says num_experts, transformers 5 num_local_experts.
        num_experts=values.count("num_local_experts", "num_experts", most=LISTED) if moe else 0,
        experts_per_token=values.count("num_experts_per_tok") if moe else 0,
        moe_ffn_hidden_size=values.count("moe_intermediate_size") if moe else 0,
        norm_topk_prob=values.flag("norm_topk_prob", default=False),
    )
    if not architecture.head_dim:
        raise values.refusal("hidden_size leaves attention heads no width", f"at least {heads}", str(hidden))
    if architecture.experts_per_token > architecture.num_experts:
        what, most = "a token cannot have as many experts as num_experts_per_tok says", architecture.num_experts
        raise values.refusal(what, f"1 to {most}", str(architecture.experts_per_token))
    return architecture


def parameters(architecture: Architecture) -> Iterator[Parameter]:
    """Every parameter of the model, in the order of the layers."""
    vocabulary = (architecture.vocab_size, architecture.hidden_size)
    yield Parameter("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), (vocabulary,), tp_dim=0)
    for layer in range(architecture.num_layers):
        at = Place(f"decoder.layers.{layer}", f"model.layers.{layer}", layer)
        yield from attention(architecture, at, "self_attn", "input_layernorm.weight")
        mixer = experts if architecture.is_moe else mlp
        yield from mixer(architecture, at, "mlp", "post_attention_layernorm.weight")
    yield Parameter("decoder.final_layernorm.weight", ("model.norm.weight",), ((architecture.hidden_size,),))
    if not architecture.tied_embeddings:
        yield Parameter("output_layer.weight", ("lm_head.weight",), (vocabulary,), tp_dim=0)


def _read_rope(config: Mapping[str, Any], values: ConfigValues, where: str) -> tuple[float, RopeScaling | None]:
    within = "rope_parameters" if values.under("rope_parameters") else "rope_scaling"
    stated, older = values.under(within), values.under("rope_scaling")
    # Under one name each, whichever of its names a description uses.
    here, there = ({"rope_type" if key == "type" else key: each[key] for key in each} for each in (stated, older))
    apart = any(key != "rope_theta" and here.get(key) != value for key, value in there.items())
    if within == "rope_parameters" and apart:
        what, found = "rope_parameters and rope_scaling describe different positions", f"{stated} and {older}"
        raise values.refusal(what, "one of them", found)
    rope = ConfigValues(stated, where, within)
    rope_type = stated.get("rope_type") or stated.get("type") or "default"
    known = " | ".join(ROPE_TYPES)
    if rope_type not in ROPE_TYPES:
        raise UnsupportedError(
            "this rotary scaling is not implemented", where=where, expected=known, found=str(rope_type)
        )
    if any(each.number("partial_rotary_factor", 1.0, nullable=False) != 1.0 for each in (rope, values)):
        raise UnsupportedError("partial rotary embeddings are not implemented", where=where)
    stated = {key: value for key, value in stated.items() if value is not None}
    unknown = sorted(set(stated) - set(RopeScaling.__dataclass_fields__) - _ROPE_BESIDES)
    if unknown:
        raise UnsupportedError("unknown rotary scaling parameters", where=where, found=", ".join(unknown))
    # YaRN divides by the logarithm of the base.
    base = rope if "rope_theta" in stated else values
    theta = base.number("rope_theta", 10000.0, least=int(rope_type == "yarn"), nullable=False)
    if rope_type == "default":
        return theta, None
    for key in _SCALED[rope_type]:
        if key not in stated:
            raise rope.refusal(f"config.json lacks {within}.{key}", f"a number, for {rope_type}", "no such key")
    numbers: dict[str, Any] = {}
    for name in ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"):
        numbers[name] = rope.number(name, getattr(RopeScaling, name), least=0, nullable=False)
    if stated.get("attention_factor") is not None:
        numbers["attention_factor"] = rope.number("attention_factor", 0.0, least=0)
    original, longest = "original_max_position_embeddings", values.count("max_position_embeddings")
    numbers[original] = rope.count(original, default=longest)
    return theta, RopeScaling(rope_type, truncate=rope.flag("truncate", default=RopeScaling.truncate), **numbers)


def _refuse_unsupported(config: Mapping[str, Any], family: str, values: ConfigValues, where: str) -> None:
    if config.get("hidden_act", "silu") != "silu":
        raise UnsupportedError("only SiLU MLPs are implemented", where=where, found=str(config["hidden_act"]))
    for key in ("attention_bias", "mlp_bias", "use_sliding_window"):
        if values.flag(key, default=False):
            raise UnsupportedError(
                f"{key} is not implemented for {family}", where=where, expected="false", found="true"
            )
    window = config.get("sliding_window")
    # The window of a Qwen counts only with use_sliding_window.
    if window is not None and not family.startswith("qwen") and config.get("use_sliding_window") is not False:
        raise UnsupportedError(
            f"sliding_window is not implemented for {family}",
            where=where,
            expected="null",
            found=str(window),
            hints=[f'"use_sliding_window": false in {where}   # if the model was trained to attend to everything'],
        )
    if any(kind != "full_attention" for kind in values.listed("layer_types")):
        raise UnsupportedError("only full attention layers are implemented", where=where)
    every = "decoder_sparse_step" not in config or values.count("decoder_sparse_step", least=0) == 1
    if not every or values.listed("mlp_only_layers"):
        raise UnsupportedError("mixtures of experts must be in every layer", where=where)
