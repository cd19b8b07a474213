"""Megatron checkpoint folders: `hf/` (config.json, tokenizer, chat template) and `weights/` (torch_dist). The weights
are written and read under megatron-core's own sharded names, so a policy in any parallel layout loads them and
`convert/*` needs no model. Optimizer state is engine/policy/checkpoint.py's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemotron_steps.errors import ArtifactError
from nemotron_steps.models.architecture import Architecture
from nemotron_steps.models.distributed_checkpoint import load_sharded, load_tensors, read_metadata, save_sharded
from nemotron_steps.models.huggingface import (
    FiniteReader,
    carried_tensors,
    copy_model_files,
    require_finite,
    save_hf_checkpoint,
)
from nemotron_steps.models.mapping import (
    Layout,
    Parameter,
    in_precision,
    megatron_shape,
    of_mtp,
    parameters,
    split,
    to_hf,
    to_megatron,
)
from nemotron_steps.models.megatron_core import ensure_process_group, load_megatron_core

if TYPE_CHECKING:
    import torch

WEIGHTS = "weights"
_PREFIX = "model"


def is_megatron_checkpoint(folder: str | Path) -> bool:
    """Whether the folder is a Megatron checkpoint rather than a Hugging Face one."""
    return (Path(folder) / WEIGHTS / "metadata.json").is_file()


@dataclass(frozen=True)
class Place:
    """Which part of a whole parameter a rank holds, and whether it is the one that writes it."""

    tensor_rank: int = 0
    tensor_size: int = 1
    expert_rank: int = 0
    expert_size: int = 1
    replica: int = 0
    """0 on exactly one of the ranks that hold the same part."""


WHOLE = Place()


def sharded_key(parameter: Parameter, architecture: Architecture) -> str:
    """megatron-core's checkpoint key. Equal layers are one tensor with a leading layer axis, a hybrid's keep their
    numbers, and so do adapters, which some layers may lack; norms live in their linear."""
    name = parameter.key or parameter.name
    if _has_layer_axis(parameter, architecture):
        name = name.replace(f"decoder.layers.{parameter.layer}.", "decoder.layers.", 1)
    return name


def _has_layer_axis(parameter: Parameter, architecture: Architecture) -> bool:
    return parameter.layer is not None and not architecture.is_hybrid and not parameter.of_adapter


def sharded_tensors(
    parameter: Parameter, tensor: torch.Tensor, architecture: Architecture, place: Place = WHOLE, *, prefix: str = ""
) -> list[Any]:
    """megatron-core ShardedTensors of one rank's part of a parameter, or, with a `prefix` of its key, of optimizer
    state of the same shape; in the order `join` puts them together. Gate and up rows are two shards, so that they can
    be cut differently by another tensor-parallel size; the parts of a Mamba-2 projection are tensors of their own."""
    import torch
    from megatron.core.dist_checkpointing import ShardedTensor

    axes = int(_has_layer_axis(parameter, architecture))
    offsets: list[tuple[int, int, int]] = []
    if parameter.layer is not None and axes:
        offsets.append((0, parameter.layer, architecture.num_layers))
    if parameter.of_experts and place.expert_size > 1:
        offsets.append((axes, place.expert_rank, place.expert_size))
    key = prefix + sharded_key(parameter, architecture)

    def made(name: str, part: torch.Tensor, *cuts: tuple[int, int, int], padded: bool = False) -> Any:
        kept = {"replica_id": place.replica, "prepend_axis_num": axes, "allow_shape_mismatch": padded}
        return ShardedTensor.from_rank_offsets(name, part, *offsets, *cuts, **kept)

    if parameter.layout in (Layout.GATE_UP, Layout.EXPERTS_GATE_UP):
        dim = 1 if parameter.of_experts else 0
        # ETP is always 1, so experts' rows are never cut.
        rank, size = (0, 1) if parameter.of_experts else (place.tensor_rank, place.tensor_size)
        halves = tensor.chunk(2, dim=dim)
        return [made(key, half, (axes + dim, at * size + rank, 2 * size)) for at, half in enumerate(halves)]
    cut = (place.tensor_rank, place.tensor_size)
    if parameter.layout is Layout.PARTS:
        rows = [rows // place.tensor_size for _, rows in parameter.parts]
        parts = zip(parameter.parts, torch.split(tensor, rows), strict=True)
        return [made(f"{key}.{name}", part, (axes, *cut)) for (name, _), part in parts]
    cuts = [(axes + parameter.tp_dim, *cut)] if parameter.tp_dim is not None and place.tensor_size > 1 else []
    # The vocabulary is padded to a multiple of the tensor-parallel size.
    return [made(key, tensor, *cuts, padded=parameter.layer is None and parameter.tp_dim is not None)]


def join(parameter: Parameter, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """One rank's part of a parameter from its loaded shards."""
    import torch

    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=1 if parameter.of_experts else 0)


def save_megatron_weights(
    weights: Iterable[tuple[Parameter, torch.Tensor]], architecture: Architecture, folder: str | Path
) -> None:
    """Write whole Megatron tensors as `folder`, a torch_dist checkpoint. Collective; every rank has all of them."""
    import torch.distributed as dist

    load_megatron_core()
    ensure_process_group()
    place = Place(replica=dist.get_rank())
    state = {p.name: sharded_tensors(p, tensor, architecture, place) for p, tensor in weights}
    save_sharded({_PREFIX: state}, folder)


def load_megatron_weights(folder: str | Path, architecture: Architecture) -> dict[str, torch.Tensor]:
    """Whole Megatron tensors of a torch_dist checkpoint, by name, on CPU, in one process. ArtifactError when it is
    incomplete or of another architecture."""
    import torch

    load_megatron_core()
    ensure_process_group()
    stored = stored_tensors(folder, architecture)
    state = {}
    for parameter in parameters(architecture):
        key = _stored_keys(parameter, architecture)[0]
        if key not in stored:
            if parameter.optional:
                continue
            raise ArtifactError(f"the checkpoint lacks {key}", where=str(folder))
        empty = torch.empty(megatron_shape(parameter), dtype=stored[key].properties.dtype)
        state[parameter.name] = sharded_tensors(parameter, empty, architecture)
    loaded = load_sharded({_PREFIX: state}, folder)[_PREFIX]
    return {p.name: join(p, loaded[p.name]) for p in parameters(architecture) if p.name in loaded}


def stored_tensors(folder: str | Path, architecture: Architecture) -> Mapping[str, Any]:
    """What the weights of a Megatron checkpoint say of each tensor, by key. ArtifactError for one that the model has no
    place for; optimizer states and what multi-token prediction has may stay unread."""
    stored: Mapping[str, Any] = read_metadata(folder).state_dict_metadata
    known = {key for p in parameters(architecture) for key in _stored_keys(p, architecture)}
    unread = ("optimizer.", "" if architecture.trains_mtp else "mtp.")
    extra = sorted(
        key
        for key, entry in stored.items()
        if hasattr(entry, "size") and key not in known and not any(start and key.startswith(start) for start in unread)
    )
    if extra:
        raise ArtifactError(
            f"the checkpoint has a tensor that this model has no place for: {extra[0]}",
            where=str(folder),
            expected="the tensors that hf/config.json says, and no more",
            found=f"{len(extra)} more",
        )
    return stored


def _stored_keys(parameter: Parameter, architecture: Architecture) -> list[str]:
    key = sharded_key(parameter, architecture)
    return [f"{key}.{name}" for name, _ in parameter.parts] or [key]


def trained_mtp(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Hugging Face tensors of multi-token prediction that are among the weights of a Megatron checkpoint folder, none
    where it was not trained. Not collective."""
    import torch

    if not is_megatron_checkpoint(folder):
        return
    architecture = replace(Architecture.from_folder(folder), trains_mtp=True)
    stored = read_metadata(folder / WEIGHTS).state_dict_metadata
    for parameter in parameters(architecture):
        if not of_mtp(parameter, architecture):
            continue
        keys = _stored_keys(parameter, architecture)
        if keys[0] not in stored:
            return
        parts = {name: torch.empty(stored[name].size, dtype=stored[name].properties.dtype) for name in keys}
        load_tensors(parts, folder / WEIGHTS, alone=True)
        yield from split(parameter, join(parameter, list(parts.values())), architecture)


def convert_hf_to_megatron(source: str | Path, target: str | Path, precision: str = "keep") -> None:
    """A Hugging Face folder → a Megatron checkpoint folder, in `precision` (mapping.in_precision)."""
    source, target = Path(source), Path(target)
    architecture = Architecture.from_folder(source)
    reader = FiniteReader(source)
    weights = ((p, in_precision(p.name, tensor, precision)) for p, tensor in to_megatron(reader, architecture))
    save_megatron_weights(weights, architecture, target / WEIGHTS)
    copy_model_files(source, target / "hf", precision=precision)


def convert_megatron_to_hf(source: str | Path, target: str | Path, precision: str = "keep") -> None:
    """A Megatron checkpoint folder → a Hugging Face folder that plain transformers loads, in `precision`."""
    source, target = Path(source), Path(target)
    if not is_megatron_checkpoint(source):
        raise ArtifactError("not a Megatron checkpoint", where=str(source), expected="hf/ and weights/metadata.json")
    architecture = Architecture.from_folder(source)
    weights = load_megatron_weights(source / WEIGHTS, architecture)
    finite = ((name, require_finite(name, tensor, source)) for name, tensor in to_hf(weights, architecture))
    whole = chain(finite, carried_tensors(source / "hf"))
    save_hf_checkpoint(target, ((name, in_precision(name, tensor, precision)) for name, tensor in whole), source / "hf")
