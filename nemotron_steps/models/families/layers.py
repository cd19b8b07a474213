"""The parameters of the layers that families have in common, under Megatron's names and the hub's."""

from collections.abc import Iterator
from dataclasses import dataclass

from nemotron_steps.models.architecture import Architecture
from nemotron_steps.models.mapping import Layout, Parameter


@dataclass(frozen=True)
class Place:
    """Where a layer is: its name here and on the hub, and its number, which goes on after the model's last layer."""

    ours: str
    theirs: str
    layer: int

    def copied(
        self, name: str, hf_name: str, *shape: int, tp_dim: int | None = None, key: str = "", optional: bool = False
    ) -> Parameter:
        """A tensor that is the same in both."""
        key = f"{self.ours}.{key}" if key else ""
        names = (f"{self.theirs}.{hf_name}",)
        return Parameter(f"{self.ours}.{name}", names, (shape,), Layout.COPY, tp_dim, self.layer, optional, key=key)

    def fused(self, name: str, layout: Layout, names: list[str], *shapes: tuple[int, ...]) -> Parameter:
        """Several tensors, all of the last shape or each of its own; rows are cut, experts are not."""
        cut = None if layout in (Layout.EXPERTS, Layout.EXPERTS_GATE_UP) else 0
        shapes = shapes if len(shapes) == len(names) else shapes * len(names)
        hf_names = tuple(f"{self.theirs}.{each}" for each in names)
        return Parameter(f"{self.ours}.{name}", hf_names, shapes, layout, cut, self.layer)


def attention(a: Architecture, at: Place, theirs: str, norm: str) -> Iterator[Parameter]:
    """`theirs`, `norm`: what the hub calls the module and the norm before it."""
    hidden, width = a.hidden_size, a.head_dim
    queries, keys = a.num_attention_heads * width, a.num_key_value_heads * width
    yield at.copied("input_layernorm.weight", norm, hidden, key="self_attention.linear_qkv.layer_norm_weight")
    for kind, columns in (("weight", (hidden,)), ("bias", ())):
        if kind == "bias" and not a.qkv_bias:
            continue
        names = [f"{theirs}.{part}_proj.{kind}" for part in "qkv"]
        shapes = [(rows, *columns) for rows in (queries, keys, keys)]
        yield at.fused(f"self_attention.linear_qkv.{kind}", Layout.QKV, names, *shapes)
    for part in "qk" if a.qk_norm else "":
        yield at.copied(f"self_attention.{part}_layernorm.weight", f"{theirs}.{part}_norm.weight", width)
    yield at.copied("self_attention.linear_proj.weight", f"{theirs}.o_proj.weight", hidden, queries, tp_dim=1)


def mlp(a: Architecture, at: Place, theirs: str, norm: str) -> Iterator[Parameter]:
    """As `attention`."""
    hidden, inner = a.hidden_size, a.ffn_hidden_size
    yield at.copied("pre_mlp_layernorm.weight", norm, hidden, key="mlp.linear_fc1.layer_norm_weight")
    if a.activation == "swiglu":
        names = [f"{theirs}.{part}_proj.weight" for part in ("gate", "up")]
        yield at.fused("mlp.linear_fc1.weight", Layout.GATE_UP, names, (inner, hidden))
    else:
        yield at.copied("mlp.linear_fc1.weight", f"{theirs}.up_proj.weight", inner, hidden, tp_dim=0)
    yield at.copied("mlp.linear_fc2.weight", f"{theirs}.down_proj.weight", hidden, inner, tp_dim=1)


def experts(a: Architecture, at: Place, theirs: str, norm: str) -> Iterator[Parameter]:
    """As `attention`."""
    hidden, count, inner = a.hidden_size, a.num_experts, a.moe_ffn_hidden_size
    shared, latent = a.shared_ffn_hidden_size, a.moe_latent_size
    yield at.copied("pre_mlp_layernorm.weight", norm, hidden)
    yield at.copied("mlp.router.weight", f"{theirs}.gate.weight", count, hidden)
    if a.router_bias:
        # No public Qwen3-MoE checkpoint has one; the name is that of the families that do.
        name = f"{theirs}.gate.e_score_correction_bias"
        yield at.copied("mlp.router.expert_bias", name, count, optional=not a.is_hybrid)
    gated = a.activation == "swiglu"
    layout, parts = (Layout.EXPERTS_GATE_UP, ["gate", "up"]) if gated else (Layout.EXPERTS, ["up"])
    each = [f"{theirs}.experts.{expert}" for expert in range(count)]
    names = [f"{expert}.{part}_proj.weight" for expert in each for part in parts]
    yield at.fused("mlp.experts.linear_fc1.weight", layout, names, (inner, latent or hidden))
    names = [f"{expert}.down_proj.weight" for expert in each]
    yield at.fused("mlp.experts.linear_fc2.weight", Layout.EXPERTS, names, (latent or hidden, inner))
    if latent:
        yield at.copied("mlp.fc1_latent_proj.weight", f"{theirs}.fc1_latent_proj.weight", latent, hidden)
        yield at.copied("mlp.fc2_latent_proj.weight", f"{theirs}.fc2_latent_proj.weight", hidden, latent)
    if shared:
        ours, theirs = "mlp.shared_experts.linear_fc", f"{theirs}.shared_experts"
        yield at.copied(f"{ours}1.weight", f"{theirs}.up_proj.weight", shared, hidden, tp_dim=0)
        yield at.copied(f"{ours}2.weight", f"{theirs}.down_proj.weight", hidden, shared, tp_dim=1)
