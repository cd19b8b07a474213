"""Nemotron-H (Nemotron Nano 2, Nemotron 3 Nano and Super): hybrids of Mamba-2, attention, MLPs and experts. Both
generations of config files are read: the older ones write the layers as one string (`hybrid_override_pattern`), those
of transformers 5 as a list of names (`layers_block_type`)."""

from collections.abc import Iterator, Mapping
from typing import Any

from nemotron_steps.config.families import KINDS, LETTERS, LISTED, UNKNOWN, if_absent, pattern_of, time_step_limit
from nemotron_steps.errors import UnsupportedError
from nemotron_steps.models.architecture import Architecture, Mamba2
from nemotron_steps.models.families import ConfigValues
from nemotron_steps.models.mapping import Layout, Parameter, Place, attention, experts, mlp

CARRIED = "mtp."
"""Multi-token prediction: transformers does not have it, a policy only if it trains it, and no conversion loses it."""
_BIASES = ("use_bias", "mamba_proj_bias", "mlp_bias", "attention_bias")


def read(config: Mapping[str, Any], where: str) -> Architecture:
    """See Architecture.from_config."""
    _refuse_unsupported(config, where)
    values = ConfigValues(config, where)
    pattern = _pattern(config, "hybrid_override_pattern", "layers_block_type", values)
    if not pattern:
        named = "layers_block_type (or hybrid_override_pattern)"
        raise values.refusal(f"config.json lacks {named}", "one kind for each layer", "no such key")
    layers = values.count("num_hidden_layers", default=len(pattern))
    if layers != len(pattern):
        raise values.refusal(
            "the layer pattern has another length than num_hidden_layers",
            f"{layers} layers",
            f"{len(pattern)}: {pattern}",
        )
    mtp_layers = values.count("num_nextn_predict_layers", least=0, most=LISTED, default=0)
    mtp_pattern = _pattern(config, "mtp_hybrid_override_pattern", "mtp_layers_block_type", values) or "*E"
    experts = "E" in pattern
    heads, shared = values.count("num_attention_heads"), "num_key_value_heads"
    architecture = Architecture(
        family="nemotron_h",
        hidden_size=values.count("hidden_size"),
        num_layers=len(pattern),
        num_attention_heads=heads,
        num_key_value_heads=values.count(shared, default=if_absent(config, shared, heads)),
        head_dim=values.count("head_dim", "attention_head_dim", default=128),
        ffn_hidden_size=values.count("intermediate_size", least=int("-" in pattern)),
        vocab_size=values.count("vocab_size"),
        rope_theta=values.number("rope_theta", 10000.0, least=0),
        norm_eps=values.number("layer_norm_epsilon", 1e-5, least=0),
        max_position_embeddings=values.count("max_position_embeddings"),
        # Neither transformers nor vLLM ties these, whatever tie_word_embeddings says: lm_head is always there.
        tied_embeddings=False,
        initializer_range=values.number("initializer_range", 0.02, least=0),
        num_experts=values.count("n_routed_experts", "num_local_experts", most=LISTED) if experts else 0,
        experts_per_token=values.count("num_experts_per_tok") if experts else 0,
        moe_ffn_hidden_size=values.count("moe_intermediate_size") if experts else 0,
        norm_topk_prob=values.flag("norm_topk_prob", default=True),
        router_bias=experts,
        pattern=pattern,
        mamba=_mamba(config, values) if "M" in pattern else None,
        activation="relu2",
        rotary=False,
        router_score="sigmoid",
        router_groups=values.count("n_group", default=1) if experts else 1,
        router_top_groups=values.count("topk_group", default=1) if experts else 1,
        routed_scaling_factor=values.number("routed_scaling_factor", 1.0) if experts else 1.0,
        shared_ffn_hidden_size=values.count("moe_shared_expert_intermediate_size") if experts else 0,
        moe_latent_size=values.count("moe_latent_size", least=0, default=0) if experts else 0,
        mtp_pattern=mtp_pattern if mtp_layers else "",
        mtp_layers=mtp_layers,
    )
    mamba, groups = architecture.mamba, architecture.router_groups
    if architecture.num_experts % groups or (mamba is not None and mamba.num_heads % mamba.num_groups):
        what = "heads of Mamba-2 and experts must divide evenly over their groups"
        raise values.refusal(what, "a multiple of n_groups, and of n_group", f"{mamba}; {groups} groups of experts")
    return architecture


def parameters(architecture: Architecture) -> Iterator[Parameter]:
    """Every parameter of the model, in the order of the layers, under the names of megatron-core's hybrid model."""
    vocabulary = (architecture.vocab_size, architecture.hidden_size)
    yield Parameter("embedding.word_embeddings.weight", ("backbone.embeddings.weight",), (vocabulary,), tp_dim=0)
    for layer, kind in enumerate(architecture.pattern):
        yield from _layer(architecture, Place(f"decoder.layers.{layer}", f"backbone.layers.{layer}", layer), kind)
    if architecture.trains_mtp:
        for block in range(architecture.mtp_layers):
            yield from _prediction_block(architecture, block)
    yield Parameter("decoder.final_norm.weight", ("backbone.norm_f.weight",), ((architecture.hidden_size,),))
    yield Parameter("output_layer.weight", ("lm_head.weight",), (vocabulary,), tp_dim=0)


def _layer(a: Architecture, at: Place, kind: str) -> Iterator[Parameter]:
    mixers = {"*": attention, "-": mlp, "E": experts}
    if kind in mixers:
        yield from mixers[kind](a, at, "mixer", "norm.weight")
        return
    mamba, hidden = a.mamba, a.hidden_size
    assert mamba is not None
    inner, shared, heads = mamba.inner_size, mamba.num_groups * mamba.state_size, mamba.num_heads
    convolved = (("x", inner), ("B", shared), ("C", shared))

    def in_parts(name: str, parts: tuple[tuple[str, int], ...], *columns: int) -> Parameter:
        ours, theirs = f"{at.ours}.mixer.{name}", f"{at.theirs}.mixer.{name}"
        shape = (sum(rows for _, rows in parts), *columns)
        return Parameter(ours, (theirs,), (shape,), Layout.PARTS, 0, at.layer, parts=parts)

    yield at.copied("norm.weight", "norm.weight", hidden, key="mixer.in_proj.layer_norm_weight")
    yield in_parts("in_proj.weight", (("z", inner), *convolved, ("dt", heads)), hidden)
    yield in_parts("conv1d.weight", convolved, 1, mamba.conv_kernel)
    if mamba.conv_bias:
        yield in_parts("conv1d.bias", convolved)
    for name in ("dt_bias", "A_log", "D"):
        yield at.copied(f"mixer.{name}", f"mixer.{name}", heads, tp_dim=0)
    yield at.copied("mixer.norm.weight", "mixer.norm.weight", inner, tp_dim=0)
    yield at.copied("mixer.out_proj.weight", "mixer.out_proj.weight", hidden, inner, tp_dim=1)


def _prediction_block(a: Architecture, block: int) -> Iterator[Parameter]:
    """A block of multi-token prediction, whose layers the hub numbers through over all blocks: what leads in is with
    its first layer, the norm that leads out with its last."""
    hidden, ours, start = a.hidden_size, f"mtp.layers.{block}", block * len(a.mtp_pattern)

    def place(layer: int, name: str = ours) -> Place:
        return Place(name, f"mtp.layers.{start + layer}", a.num_layers + start + layer)

    for norm in ("enorm", "hnorm"):
        yield place(0).copied(f"{norm}.weight", f"{norm}.weight", hidden)
    yield place(0).copied("eh_proj.weight", "eh_proj.weight", hidden, 2 * hidden)
    for layer, kind in enumerate(a.mtp_pattern):
        yield from _layer(a, place(layer, f"{ours}.mtp_model_layer.layers.{layer}"), kind)
    name = "final_layernorm.weight"
    yield place(len(a.mtp_pattern) - 1).copied(name, name, hidden)


def _pattern(config: Mapping[str, Any], as_string: str, as_list: str, values: ConfigValues) -> str:
    """One letter a layer, from whichever of the two keys there is; empty where neither is."""
    pattern = pattern_of(config, as_list, as_string)
    if UNKNOWN in pattern:
        key, known = (as_list, LETTERS) if config.get(as_list) is not None else (as_string, KINDS)
        unknown = ", ".join(sorted({str(each) for each in config[key]} - known.keys()))
        raise values.refusal(f"{key} names layers that do not exist", " | ".join(known), unknown)
    return pattern


def _mamba(config: Mapping[str, Any], values: ConfigValues) -> Mamba2:
    try:
        least, most = time_step_limit(config)
    except (KeyError, TypeError, ValueError, OverflowError):
        least, most = 0.0, -1.0
    if not least <= most or most <= 0:
        expected = "two numbers, the least first, and a greatest above 0"
        raise values.refusal("time_step_limit leaves no time step", expected, str(config.get("time_step_limit"))[:60])
    return Mamba2(
        num_heads=values.count("mamba_num_heads"),
        head_dim=values.count("mamba_head_dim"),
        state_size=values.count("ssm_state_size"),
        num_groups=values.count("n_groups", "mamba_n_groups"),
        conv_kernel=values.count("conv_kernel", "mamba_d_conv"),
        chunk_size=values.count("chunk_size", "mamba_chunk_size"),
        time_step_limit=(least, most),
        conv_bias=values.flag("mamba_conv_bias", "use_conv_bias", default=True),
    )


def _refuse_unsupported(config: Mapping[str, Any], where: str) -> None:
    """UnsupportedError for what the published models do not have, and nothing here computes."""
    only: dict[str, Any] = {"mlp_hidden_act": "relu2", "mamba_hidden_act": "silu"}
    only |= dict.fromkeys((*_BIASES, "residual_in_fp32", "sliding_window"), False)
    # Of models without experts the number of shared ones says nothing.
    only |= {"n_shared_experts": 1} if "E" in pattern_of(config) else {}
    for key, known in only.items():
        stated, expected = config.get(key, known), str(known).lower()
        if stated != known and (stated or known is not False):
            raise UnsupportedError(
                f"this {key} is not implemented for nemotron_h",
                where=where,
                expected=expected,
                found=str(stated),
                hints=(f"--input PORT=PATH   # a model whose config.json has {key} {expected}",),
            )
