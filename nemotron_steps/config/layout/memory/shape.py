"""The shape of a decoder-only model, and how many of its parameters one rank holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

from nemotron_steps.config.families import (
    FAMILIES,
    LARGEST,
    LISTED,
    QK_NORM,
    QKV_BIAS,
    UNKNOWN,
    if_absent,
    pattern_of,
)
from nemotron_steps.config.layout.parallel_config import ParallelConfig, stage_layers

ATTENTION, MLP, EXPERTS, MAMBA = "*", "-", "E", "M"
FLOAT32 = 4


@dataclass(frozen=True)
class MambaShape:
    """A Mamba-2 mixer."""

    heads: int
    head_dim: int
    state: int
    groups: int
    kernel: int
    chunk: int

    @property
    def inner(self) -> int:
        """Width of what it mixes."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Of its convolution: x, B and C."""
        return self.inner + 2 * self.groups * self.state

    @property
    def rows(self) -> int:
        """Of its input projection: z, x, B, C and dt."""
        return self.inner + self.channels + self.heads


@dataclass(frozen=True)
class Held:
    """What a rank holds of a model, in elements: trained in the model's precision (of which `experts` are reduced over
    fewer ranks), trained in float32 whatever that is (`exact`), and frozen, in float32."""

    dense: int = 0
    exact: int = 0
    experts: int = 0
    frozen: int = 0

    def __add__(self, other: Held) -> Held:
        return Held(*map(sum, zip(astuple(self), astuple(other), strict=True)))

    def __mul__(self, count: int) -> Held:
        return Held(*(each * count for each in astuple(self)))

    @property
    def total(self) -> int:
        """All elements."""
        return sum(astuple(self))

    def bytes(self, element: int) -> int:
        """As weights."""
        return (self.dense + self.experts) * element + (self.exact + self.frozen) * FLOAT32


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model under short names; 0 for what it lacks. `layers`: the mixers of each: "*-" is attention and an
    MLP, "*E" attention and experts, hybrids have one; `ahead`: the same of a block of multi-token prediction."""

    family: str
    hidden: int
    layers: tuple[str, ...]
    heads: int
    key_value_heads: int
    head_dim: int
    ffn: int
    vocabulary: int
    tied: bool = False
    qk_norm: bool = False
    qkv_bias: bool = False
    gated: bool = True
    experts: int = 0
    experts_per_token: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    latent: int = 0
    router_bias: bool = False
    mamba: MambaShape | None = None
    ahead: tuple[str, ...] = ()
    blocks: int = 0

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> ModelShape | None:
        """From what config.json says, or as much of it as is recorded of a checkpoint; None if that is too little."""

        def number(*names: str, default: int | None = None, most: int = LARGEST) -> int:
            value = next((config[name] for name in names if type(config.get(name)) is int), default)
            if value is None or not 0 <= value <= most:
                raise KeyError(names[0])
            return value

        try:
            family = str(config["model_type"])
            hybrid = family in FAMILIES and FAMILIES[family].kind == "hybrid"
            hidden, heads = number("hidden_size"), number("num_attention_heads")
            width = if_absent(config, "head_dim", 128 if hybrid else hidden // heads)
            experts = number("n_routed_experts", "num_local_experts", "num_experts", default=0)
            layers, mamba = tuple(pattern_of(config)), None
            if not hybrid:
                layers = (ATTENTION + (EXPERTS if experts else MLP),) * number("num_hidden_layers", most=LISTED)
            elif not layers or UNKNOWN in layers:
                return None
            elif MAMBA in layers:
                mamba = MambaShape(
                    number("mamba_num_heads"),
                    number("mamba_head_dim"),
                    number("ssm_state_size"),
                    number("n_groups", "mamba_n_groups"),
                    number("conv_kernel", "mamba_d_conv"),
                    number("chunk_size", "mamba_chunk_size"),
                )
            experts = 0 if hybrid and EXPERTS not in layers else experts
            return cls(
                family=family,
                hidden=hidden,
                layers=layers,
                heads=heads,
                key_value_heads=number("num_key_value_heads", default=if_absent(config, "num_key_value_heads", heads)),
                head_dim=number("head_dim", "attention_head_dim", default=width),
                ffn=number("intermediate_size", default=0),
                vocabulary=number("vocab_size"),
                tied=config.get("tie_word_embeddings") is True and not hybrid,
                qk_norm=family in QK_NORM,
                qkv_bias=family in QKV_BIAS,
                gated=not hybrid,
                experts=experts,
                experts_per_token=number("num_experts_per_tok") if experts else 0,
                expert_ffn=number("moe_intermediate_size") if experts else 0,
                shared_ffn=number("moe_shared_expert_intermediate_size", default=0) if experts else 0,
                latent=number("moe_latent_size", default=0) if experts else 0,
                router_bias=hybrid and experts > 0,
                mamba=mamba,
                ahead=tuple(pattern_of(config, "mtp_layers_block_type", "mtp_hybrid_override_pattern") or "*E"),
                blocks=number("num_nextn_predict_layers", default=0) if hybrid else 0,
            )
        except (KeyError, ZeroDivisionError):
            return None

    @property
    def parameters(self) -> int:
        """Of the whole model."""
        return held(self, ParallelConfig(), 0).total

    @property
    def outer(self) -> int:
        """Width of what experts take and give."""
        return self.latent or self.hidden

    @property
    def routes(self) -> int:
        """Experts that a token goes through, over all layers."""
        return sum(layer.count(EXPERTS) for layer in self.layers) * self.experts_per_token

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of a token in all layers, in 16 bits."""
        attending = sum(layer.count(ATTENTION) for layer in self.layers)
        return attending * 2 * self.key_value_heads * self.head_dim * 2

    def state_bytes(self, element: int, *, decoding: bool = False) -> int:
        """Of a sequence: the float32 states of its Mamba layers, and its newest inputs of their convolutions in
        `element` bytes, one more of those while it is decoded."""
        if self.mamba is None:
            return 0
        mixing = sum(layer.count(MAMBA) for layer in self.layers)
        inputs = self.mamba.channels * (self.mamba.kernel - (not decoding)) * element
        return mixing * (self.mamba.inner * self.mamba.state * FLOAT32 + inputs)


def held(shape: ModelShape, sizes: ParallelConfig, stage: int, *, frozen_router: bool = False) -> Held:
    """What a rank of a pipeline stage holds."""
    counts = Counter("".join(layers_of(shape, sizes.pipeline, stage))).items()
    own = (_of_mixer(shape, mixer, sizes, frozen_router=frozen_router) * count for mixer, count in counts)
    embedding = -(-shape.vocabulary // sizes.tensor) * shape.hidden
    last = stage == sizes.pipeline - 1
    # A tied output layer is the embedding, of which the last of several stages has a copy; so has multi-token
    # prediction, which is there too.
    copies = int(stage == 0) + int(last and (not shape.tied or sizes.pipeline > 1))
    copies += int(last and sizes.mtp_layers > 0 and sizes.pipeline > 1)
    return sum(own, Held(dense=copies * embedding + (shape.hidden if last else 0)))


def held_ahead(shape: ModelShape, sizes: ParallelConfig, stage: int) -> Held:
    """Of the blocks of multi-token prediction, where they are trained; their router always is."""
    if not sizes.mtp_layers or not shape.blocks or stage != sizes.pipeline - 1:
        return Held()
    own = (_of_mixer(shape, mixer, sizes, frozen_router=False) for mixer in "".join(shape.ahead))
    return sum(own, Held(dense=(2 * shape.hidden + 3) * shape.hidden)) * shape.blocks


def layers_of(shape: ModelShape, stages: int, stage: int) -> tuple[str, ...]:
    """The layers of a pipeline stage."""
    own = stage_layers(len(shape.layers), stages)[stage]
    return shape.layers[own.start : own.stop]


def _of_mixer(shape: ModelShape, mixer: str, sizes: ParallelConfig, *, frozen_router: bool) -> Held:
    """A mixer and the norm before it."""
    hidden, tensor, products = shape.hidden, sizes.tensor, 3 if shape.gated else 2
    if mixer == ATTENTION:
        query, both = shape.heads * shape.head_dim, 2 * shape.key_value_heads * shape.head_dim
        cut = (hidden + int(shape.qkv_bias)) * (query + both) + query * hidden
        return Held(dense=hidden + cut // tensor + (2 * shape.head_dim if shape.qk_norm else 0))
    if mixer == MLP:
        return Held(dense=hidden + products * hidden * shape.ffn // tensor)
    if mixer == MAMBA:
        mamba = shape.mamba
        assert mamba is not None
        cut = mamba.rows * hidden + mamba.channels * (mamba.kernel + 1) + mamba.inner * (hidden + 1)
        return Held(dense=hidden + cut // tensor, exact=3 * mamba.heads // tensor)
    router = shape.experts * hidden
    beside = products * hidden * shape.shared_ffn // tensor + 2 * shape.latent * hidden
    return Held(
        dense=hidden + beside + (0 if frozen_router else router),
        experts=shape.experts // sizes.expert * products * shape.outer * shape.expert_ffn,
        frozen=(router if frozen_router else 0) + (shape.experts if shape.router_bias else 0),
    )


def held_by_adapters(
    shape: ModelShape,
    sizes: ParallelConfig,
    stage: int,
    dim: int,
    targets: Sequence[str] = (),
    excluded: Sequence[str] = (),
    *,
    fused: bool = True,
) -> Held:
    """Low-rank adapters (models/adapters.py) of a rank: of linears that `targets` and `excluded` name, a pattern by its
    last part. Column-parallel ones have their rows of B and all of A, row-parallel ones their columns of A and all of
    B. Not fused, as the dtensor policy has them, every projection has an A of its own."""
    query, both = shape.heads * shape.head_dim, 2 * shape.key_value_heads * shape.head_dim
    hidden, up = shape.hidden, 2 if shape.gated else 1
    widths = [
        (ATTENTION, "linear_qkv", (1 if fused else 3) * hidden, query + both),
        (ATTENTION, "linear_proj", hidden, query),
        (MLP, "linear_fc1", (1 if fused else up) * hidden, up * shape.ffn),
        (MLP, "linear_fc2", hidden, shape.ffn),
    ]
    if shape.mamba is not None:
        widths += [(MAMBA, "in_proj", hidden, shape.mamba.rows), (MAMBA, "out_proj", hidden, shape.mamba.inner)]
    named, without = ({name.rpartition(".")[2] for name in names} for names in (targets, excluded))
    counts, total = Counter("".join(layers_of(shape, sizes.pipeline, stage))), 0
    for mixer, name, whole, cut in widths:
        if (not named or name in named) and name not in without:
            total += counts[mixer] * dim * (whole + cut // sizes.tensor)
    return Held(dense=total)
