"""Hugging Face weight names and layouts ↔ Megatron's, tensor by tensor, bit-exact both ways.

One `Parameter` per Megatron parameter says which Hugging Face tensors it is made of, how they are laid out in it,
and how it is cut under tensor parallelism. Megatron's fused layouts:

    qkv      rows grouped by key-value head: [q heads of group 0, k 0, v 0, q heads of group 1, k 1, v 1, …]
    gate_up  all gate rows, then all up rows; under tensor parallelism each rank holds its gate rows, then its up rows
    parts    as gate_up, for tensors that are several things one above another in both: Mamba-2's z, x, B, C and dt
    experts  one tensor for all experts of a layer, experts first; expert parallelism cuts it there

Names are those of the whole model on one rank; pipeline and expert parallelism only choose which of them a rank has.
"""

from __future__ import annotations

import shlex
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from nemotron_steps.errors import ArtifactError
from nemotron_steps.models.architecture import Architecture, quantised

if TYPE_CHECKING:
    import torch

    from nemotron_steps.models.huggingface import WeightReader

HEAD = "lm_head.weight"
EXACT = (".expert_bias", ".e_score_correction_bias", ".A_log", ".D", ".dt_bias")
"""Ends of names, in either world, of tensors that stay float32 whatever the rest of the model is in."""


def in_precision(name: str, tensor: torch.Tensor, precision: str) -> torch.Tensor:
    """A tensor of either world in `precision`: keep, or a torch type; EXACT ones in float32, quantised ones as is."""
    import torch

    if precision == "keep" or not tensor.is_floating_point() or tensor.element_size() < 2:
        return tensor
    return tensor.to(torch.float32 if name.endswith(EXACT) else getattr(torch, precision))


class Layout(StrEnum):
    """How Hugging Face tensors sit inside a Megatron parameter."""

    COPY = "copy"
    QKV = "qkv"
    GATE_UP = "gate_up"
    EXPERTS_GATE_UP = "experts_gate_up"  # [experts, 2 · inner, hidden]
    EXPERTS = "experts"  # [experts, rows, columns]
    PARTS = "parts"


@dataclass(frozen=True)
class Parameter:
    """One Megatron parameter of the whole model. tp_dim: dimension cut under tensor parallelism; None when every rank
    holds all of it; layer: of the model; of multi-token prediction, numbers after its last layer. None for what no
    layer has; optional: absent from checkpoints of models that were never trained with it; then all zeros; parts: name
    and rows of each part; tensor parallelism cuts every part by itself; key: what megatron-core's checkpoints call it;
    empty for `name`."""

    name: str
    hf_names: tuple[str, ...]
    hf_shapes: tuple[tuple[int, ...], ...]
    layout: Layout = Layout.COPY
    tp_dim: int | None = None
    layer: int | None = None
    optional: bool = False
    parts: tuple[tuple[str, int], ...] = ()
    key: str = ""

    @property
    def of_experts(self) -> bool:
        """Whether dimension 0 counts experts."""
        return self.layout in (Layout.EXPERTS_GATE_UP, Layout.EXPERTS)

    @property
    def of_adapter(self) -> bool:
        """Whether it is a low-rank adapter's (adapters.py)."""
        return ".adapter." in self.name


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


def parameters(architecture: Architecture) -> list[Parameter]:
    """Every parameter of the model, in the order of the layers."""
    from nemotron_steps.models.families import module_of

    return list(module_of(architecture.family).parameters(architecture))


def merge(parameter: Parameter, tensors: Sequence[torch.Tensor], architecture: Architecture) -> torch.Tensor:
    """The Megatron tensor made of the Hugging Face tensors, in the order of `parameter.hf_names`."""
    import torch

    if parameter.layout in (Layout.COPY, Layout.PARTS):
        return tensors[0]
    if parameter.layout is Layout.GATE_UP:
        return torch.cat(list(tensors))
    if parameter.of_experts:
        return torch.stack(list(tensors)).view(-1, *megatron_shape(parameter)[1:])
    groups = architecture.num_key_value_heads
    tail = tensors[0].shape[1:]
    # [groups, heads of the group · head_dim, …]: a group's rows are its query heads, its key, its value.
    return torch.cat([tensor.reshape(groups, -1, *tail) for tensor in tensors], dim=1).reshape(-1, *tail)


def split(parameter: Parameter, tensor: torch.Tensor, architecture: Architecture) -> list[tuple[str, torch.Tensor]]:
    """The Hugging Face tensors inside a whole Megatron tensor: views wherever the layout allows it."""
    import torch

    if parameter.layout in (Layout.COPY, Layout.PARTS):
        return [(parameter.hf_names[0], tensor)]
    if parameter.layout is Layout.GATE_UP:
        return list(zip(parameter.hf_names, tensor.chunk(2), strict=True))
    if parameter.of_experts:
        each = tensor.view(len(parameter.hf_names), -1, tensor.shape[-1])
        return list(zip(parameter.hf_names, each.unbind(), strict=True))
    width, heads = architecture.head_dim, architecture.query_heads_per_group
    tail = tensor.shape[1:]
    grouped = tensor.view(architecture.num_key_value_heads, (heads + 2) * width, *tail)
    parts = torch.split(grouped, [heads * width, width, width], dim=1)
    return [(name, part.reshape(-1, *tail)) for name, part in zip(parameter.hf_names, parts, strict=True)]


def shard(parameter: Parameter, tensor: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """What tensor-parallel rank `rank` of `size` holds of a whole Megatron tensor."""
    import torch

    if size == 1 or parameter.tp_dim is None:
        return tensor
    if rows := _rows_of_parts(parameter):
        return torch.cat([part.chunk(size)[rank] for part in torch.split(tensor, rows)])
    return tensor.chunk(size, dim=parameter.tp_dim)[rank]


def unshard(parameter: Parameter, shards: Sequence[torch.Tensor]) -> torch.Tensor:
    """The inverse of `shard`, from every rank's piece in rank order."""
    import torch

    if len(shards) == 1 or parameter.tp_dim is None:
        return shards[0]
    if rows := [rows // len(shards) for rows in _rows_of_parts(parameter)]:
        by_part = zip(*(torch.split(piece, rows) for piece in shards), strict=True)
        return torch.cat([piece for part in by_part for piece in part])
    return torch.cat(list(shards), dim=parameter.tp_dim)


def _rows_of_parts(parameter: Parameter) -> list[int]:
    """Of what is cut by itself; none where a parameter is cut as a whole."""
    if parameter.layout is Layout.GATE_UP:
        return [shape[0] for shape in parameter.hf_shapes]
    return [rows for _, rows in parameter.parts]


def of_mtp(parameter: Parameter, architecture: Architecture) -> bool:
    """Whether a parameter is of multi-token prediction."""
    return parameter.layer is not None and parameter.layer >= architecture.num_layers


def to_megatron(
    weights: Mapping[str, torch.Tensor] | WeightReader,
    architecture: Architecture,
    *,
    mtp_alone: bool = False,
    held: Container[str] | None = None,
    experts: slice = slice(None),
) -> Iterator[tuple[Parameter, torch.Tensor]]:
    """Whole Megatron tensors of a Hugging Face checkpoint, one at a time. mtp_alone: only those of multi-token
    prediction, of weights that have no others; held: Megatron names of those that are read; None: all. Whether a name
    is missing is looked at for all; experts: which of a layer's experts are read, of tensors that have them all. Raises
    ArtifactError for tensors that are missing, too many or of another shape, UnsupportedError for quantised ones."""
    import torch

    read = weights.__getitem__ if isinstance(weights, Mapping) else weights
    names = set(weights) if isinstance(weights, Mapping) else weights.names()
    where = None if isinstance(weights, Mapping) else str(weights.folder)
    wanted = [p for p in parameters(architecture) if not mtp_alone or of_mtp(p, architecture)]
    _check_names(names, wanted, architecture, where)
    for parameter in wanted:
        if held is not None and parameter.name not in held:
            continue
        tensors, own = [], slice(None)
        if parameter.of_experts:
            first, last, _ = experts.indices(architecture.num_experts)
            each = len(parameter.hf_names) // architecture.num_experts
            own = slice(first * each, last * each)
        for name, shape in zip(parameter.hf_names[own], parameter.hf_shapes[own], strict=True):
            if name not in names:
                tensors.append(torch.zeros(shape))
                continue
            tensor = read(name)
            is_plain = tensor.is_floating_point() and tensor.element_size() >= 2
            stored = Stored(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), is_plain)
            _check_tensor(name, stored, shape, where)
            tensors.append(tensor)
        yield parameter, merge(parameter, tensors, architecture)


@dataclass(frozen=True)
class Stored:
    """What a file says of one of its tensors; `is_plain`: its numbers are floats of two bytes or more."""

    dtype: str
    shape: tuple[int, ...]
    is_plain: bool


def check_stored(stored: Mapping[str, Stored], architecture: Architecture, where: str) -> None:
    """Refuse what `to_megatron` would, before any tensor is read."""
    wanted = parameters(architecture)
    shapes = {name: shape for name, shape in hf_shapes(architecture).items() if name in stored}
    # Types first: a quantised checkpoint has scales as well, which the model has no place for.
    for name in shapes:
        _check_tensor(name, stored[name], stored[name].shape, where)
    _check_names(set(stored), wanted, architecture, where)
    for name, shape in shapes.items():
        _check_tensor(name, stored[name], shape, where)


def _check_tensor(name: str, stored: Stored, shape: tuple[int, ...], where: str | None) -> None:
    if not stored.is_plain:
        raise quantised(f"the tensor {name} is {stored.dtype}", where)
    if stored.shape != shape:
        what = f"the tensor {name} has another shape than config.json says"
        raise _misfit(what, where, expected=str(shape), found=str(stored.shape))


def _check_names(names: set[str], wanted: Sequence[Parameter], architecture: Architecture, where: str | None) -> None:
    """Refuse a checkpoint without a tensor of the model, or with one that the model has no place for."""
    from nemotron_steps.models.families import module_of

    needed = [name for p in wanted if not p.optional for name in p.hf_names]
    missing = [name for name in needed if name not in names]
    prefix = module_of(architecture.family).CARRIED
    expected = f"{len(needed)} tensors, as config.json says"
    if missing:
        untrained = "policy.megatron_cfg.mtp_num_layers=0   # trains the model without them"
        of_blocks = architecture.trains_mtp and all(name.startswith(prefix) for name in missing)
        what, found = f"the checkpoint lacks the tensor {missing[0]}", f"{len(missing)} of them missing"
        raise _misfit(what, where, *([untrained] if of_blocks else []), expected=expected, found=found)
    carried = "" if architecture.trains_mtp else prefix
    # What the model makes itself: rotary frequencies, and a tied output layer, which WeightReader compares.
    extra = []
    for name in sorted(names.difference(*(p.hf_names for p in wanted))):
        made = name.endswith("rotary_emb.inv_freq") or (name == HEAD and architecture.tied_embeddings)
        if not made and not (carried and name.startswith(carried)):
            extra.append(name)
    if extra:
        what = f"the checkpoint has a tensor that this model has no place for: {extra[0]}"
        raise _misfit(what, where, expected=expected, found=f"{len(extra)} more")


def _misfit(what: str, where: str | None, *hints: str, expected: str, found: str) -> ArtifactError:
    """The refusal of weights that are not of the model of config.json."""
    folder = "FOLDER" if where is None else shlex.quote(where)
    again = f"hf download MODEL --local-dir {folder}   # weights and config.json of one model"
    return ArtifactError(what, where=where, expected=expected, found=found, hints=(*hints, again))


def to_hf(weights: Mapping[str, torch.Tensor], architecture: Architecture) -> Iterator[tuple[str, torch.Tensor]]:
    """Hugging Face tensors of whole Megatron tensors, one at a time."""
    for parameter in parameters(architecture):
        if parameter.name not in weights:
            if parameter.optional:
                continue
            raise ArtifactError(f"the checkpoint lacks the tensor {parameter.name}")
        yield from split(parameter, weights[parameter.name], architecture)


def megatron_shape(parameter: Parameter) -> tuple[int, ...]:
    """Shape of the whole Megatron tensor."""
    shapes = parameter.hf_shapes
    if parameter.layout is Layout.EXPERTS:
        return (len(shapes), *shapes[0])
    if parameter.layout is Layout.EXPERTS_GATE_UP:
        return (len(shapes) // 2, 2 * shapes[0][0], *shapes[0][1:])
    return (sum(shape[0] for shape in shapes), *shapes[0][1:])


def hf_shapes(architecture: Architecture) -> dict[str, tuple[int, ...]]:
    """Shape of every Hugging Face tensor."""
    return {
        name: shape
        for parameter in parameters(architecture)
        for name, shape in zip(parameter.hf_names, parameter.hf_shapes, strict=True)
    }
