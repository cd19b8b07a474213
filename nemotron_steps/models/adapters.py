"""Low-rank adapters of a model: which linear layers have one, its two parameters in either world, and its folder.

    Megatron        decoder.layers.0.mlp.linear_fc1.adapter.linear_in.weight    A [r, in]
                    decoder.layers.0.mlp.linear_fc1.adapter.linear_out.weight   B [out, r]
    Hugging Face    base_model.model.model.layers.0.mlp.gate_proj.lora_A.weight, ….lora_B.weight, …up_proj…

A fused linear has one adapter; for PEFT each projection has a copy of A and its own rows of B, which is exact. A folder
is as PEFT lays it out, and base.json the checkpoint that it belongs to; missing in folders that PEFT made itself."""

from __future__ import annotations

import fnmatch
import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemotron_steps.errors import ArtifactError, ConfigError, UnsupportedError
from nemotron_steps.models.architecture import Architecture, hf_folder
from nemotron_steps.models.huggingface import FiniteReader, WeightReader, require_finite, save_hf_checkpoint
from nemotron_steps.models.initialize import as_umask_says
from nemotron_steps.models.mapping import Parameter, megatron_shape, of_mtp, parameters, to_hf

if TYPE_CHECKING:
    import torch

    from nemotron_steps.config.schema.policy import AdapterConfig, LoraConfig

LINEARS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "in_proj", "out_proj")
"""What may have an adapter, by the last part of its name."""
_OTHERS = ("router", "fc1_latent_proj", "fc2_latent_proj")
"""Linear layers that have none here."""
_LORA_KEY = "policy.dtensor_cfg.lora_cfg"
_READ_BY_OTHERS = ("in_proj", "out_proj", "gate")
"""Of transformers' linears, those whose weights other modules read, past the linear itself: Mamba-2's and routers."""
_PEFT = "base_model.model."
_SAYS_NOTHING = {
    *("peft_type", "task_type", "base_model_name_or_path", "revision", "auto_mapping", "peft_version"),
    *("inference_mode", "r", "lora_alpha", "lora_dropout", "use_rslora", "target_modules", "exclude_modules"),
    *("layers_to_transform", "layers_pattern", "megatron_core", "megatron_config", "qalora_group_size", "eva_config"),
}
"""Keys of PEFT's LoraConfig that are read here, or change nothing of a trained adapter. Others do where they are set:
whole layers beside it, several ranks, biases, repeated layers, a base that was changed (PiSSA, OLoRA, CorDA)."""
_PLAIN = {"bias": ("none",), "init_lora_weights": (True, "gaussian", "orthogonal", "eva")}
CONFIG, WEIGHTS, BASE = "adapter_config.json", "adapter_model.safetensors", "base.json"


@dataclass(frozen=True)
class AdapterPair:
    """An adapter's parameters A and B, and the weight that B A is added to."""

    base: Parameter
    linear_in: Parameter
    linear_out: Parameter

    @property
    def module(self) -> str:
        """The linear's name in the whole model."""
        return self.base.name.removesuffix(".weight")


def adapter_pairs(architecture: Architecture, config: AdapterConfig, *, key: str) -> tuple[AdapterPair, ...]:
    """The adapters that the config at `key` asks for, in the order of the layers. ConfigError for a name that matches
    no linear layer, or one that has no adapter here: experts, routers."""
    linears = {}
    for parameter in parameters(architecture):
        name = parameter.name.removesuffix(".weight")
        is_linear = parameter.name.endswith(".weight") and _leaf(name) in (*LINEARS, *_OTHERS)
        if is_linear and parameter.layer is not None and not of_mtp(parameter, architecture):
            linears[name] = parameter
    able = {name: _leaf(name) in LINEARS and "experts" not in name for name in linears}
    wanted = config.target_modules or tuple(dict.fromkeys(map(_leaf, linears)))
    pairs = []
    for name in _chosen(able, wanted, config, key, f"{key}."):
        base, stem = linears[name], f"{name}.adapter"
        linear_in = Parameter(
            f"{stem}.linear_in.weight",
            (peft_name(base.hf_names[0], "A"),),
            ((config.dim, megatron_shape(base)[1]),),
            tp_dim=1 if base.tp_dim == 1 else None,
            layer=base.layer,
        )
        linear_out = Parameter(
            f"{stem}.linear_out.weight",
            tuple(peft_name(name, "B") for name in base.hf_names),
            tuple((shape[0], config.dim) for shape in base.hf_shapes),
            base.layout,
            0 if base.tp_dim == 0 else None,
            base.layer,
            parts=base.parts,
        )
        pairs.append(AdapterPair(base, linear_in, linear_out))
    return tuple(pairs)


def lora_candidates(architecture: Architecture) -> list[str]:
    """What of a model are linear layers in transformers, as `lora_modules` takes them; without routers and experts."""
    names = []
    for each in parameters(architecture):
        if each.layer is None or each.of_experts or of_mtp(each, architecture) or each.name.endswith("router.weight"):
            continue
        for name, shape in zip(each.hf_names, each.hf_shapes, strict=True):
            if len(shape) == 2 and name.endswith(".weight"):
                names.append(name.removesuffix(".weight").replace("backbone.", "model.", 1))
    return names


def lora_modules(linears: Iterable[str], config: LoraConfig) -> list[str]:
    """Which of a transformers model's linear layers have an adapter under the dtensor policy. ConfigError as
    `adapter_pairs`."""
    able = {name: _leaf(name) not in _READ_BY_OTHERS for name in linears}
    wanted = ("*",) if config.match_all_linear else config.target_modules
    return _chosen(able, wanted, config, _LORA_KEY, f"{_LORA_KEY}.match_all_linear=false {_LORA_KEY}.")


def _chosen(able: Mapping[str, bool], wanted: Iterable[str], config: AdapterConfig, key: str, hint: str) -> list[str]:
    """Which of the linears (name → whether it can have an adapter) the config at `key` means."""

    def matching(patterns: Iterable[str]) -> list[str]:
        return [n for n in able if any(_leaf(n) == each or fnmatch.fnmatchcase(n, each) for each in patterns)]

    excluded = set(matching(config.exclude_modules))
    chosen = [name for name in matching(wanted) if name not in excluded]
    without = [name for name in chosen if not able[name]]
    unknown = [each for each in (*config.target_modules, *config.exclude_modules) if not matching((each,))]
    if unknown:
        what = f"the model has no linear layer '{unknown[0]}'"
    elif without:
        what = f"{without[0]} cannot have an adapter: experts, routers and, under the dtensor policy, Mamba-2 have none"
    elif not chosen:
        what = "no linear layer is left to have an adapter"
    else:
        return chosen
    unable = {_leaf(name) for name in able if not able[name]}
    known = ",".join(dict.fromkeys(_leaf(name) for name in able if _leaf(name) not in unable))
    again = f" {key}.exclude_modules=[]" if config.exclude_modules else ""  # the two together are refused
    raise ConfigError(
        what,
        where=f"{key}.{'exclude' if config.exclude_modules else 'target'}_modules",
        expected=known,
        found=", ".join(dict.fromkeys(map(_leaf, unknown or without))) or "none",
        hints=(f"{hint}target_modules=[{known}]{again}",),
    )


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def low_rank_sum(weight: torch.Tensor, linear_in: torch.Tensor, linear_out: torch.Tensor, scale: float) -> torch.Tensor:
    """weight + scale · B A, computed in float32, in the type of the weight."""
    return (weight.float() + scale * (linear_out.float() @ linear_in.float())).to(weight.dtype)


def peft_name(hf_name: str, letter: str) -> str:
    """What PEFT calls the `A` or `B` of a Hugging Face weight."""
    return f"{_PEFT}{hf_name.removesuffix('.weight')}.lora_{letter}.weight"


def hf_weight(name: str) -> str:
    """The Hugging Face weight that a PEFT tensor belongs to. ValueError for a name that PEFT does not give."""
    stem, found, letter = name.removesuffix(".weight").rpartition(".lora_")
    if not name.startswith(_PEFT) or not found or letter not in ("A", "B"):
        raise ValueError(name)
    return f"{stem.removeprefix(_PEFT)}.weight"


def save_adapter(
    folder: str | Path,
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    config: AdapterConfig,
    every: Collection[str],
    base: str,
    digest: str,
) -> None:
    """Write an adapter folder of PEFT-named `tensors`. every: names of all Hugging Face weights; base: the folder it
    was trained on, and the digest of that artifact, empty for none."""
    from safetensors.torch import save_file

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    kept = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors}
    save_file(kept, str(folder / WEIGHTS), metadata={"format": "pt"})
    as_umask_says(folder / WEIGHTS)
    # The last part of a name where all of it are adapted, else whole names.
    adapted = {hf_weight(name).removesuffix(".weight") for name in kept}
    others = {_leaf(name.removesuffix(".weight")) for name in every if name.removesuffix(".weight") not in adapted}
    settings: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": config.dim,
        "lora_alpha": config.alpha,
        "lora_dropout": config.dropout,
        "target_modules": sorted({module if _leaf(module) in others else _leaf(module) for module in adapted}),
        "bias": "none",
        "inference_mode": True,
        "modules_to_save": None,
        **dict.fromkeys(("fan_in_fan_out", "use_rslora", "use_dora"), False),
        "rank_pattern": {},
        "alpha_pattern": {},
    }
    for name, content in ((CONFIG, settings), (BASE, {"path": base, "digest": digest})):
        (folder / name).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


class AdapterFolder:
    """An adapter on disk: Hugging Face weight → its A and B, on CPU, and what B A is multiplied with. ArtifactError
    where it is incomplete, UnsupportedError where it is more than low-rank sums (DoRA, biases, several ranks)."""

    def __init__(self, folder: str | Path) -> None:
        folder = Path(folder)
        settings = _read_json(folder / CONFIG)
        more = {k: v for k, v in settings.items() if v and k not in _SAYS_NOTHING and v not in _PLAIN.get(k, ())}
        if settings.get("peft_type") != "LORA":
            more["peft_type"] = settings.get("peft_type")
        if more:
            raise UnsupportedError(
                "the adapter is more than one low-rank sum a projection",
                where=str(folder / CONFIG),
                expected="a plain LoRA adapter of one rank",
                found="; ".join(f"{key}: {value}" for key, value in more.items()),
                hints=("merge it with PEFT's merge_and_unload, and use the checkpoint",),
            )
        rank = settings["r"]
        self.scale = float(settings["lora_alpha"]) / (math.sqrt(rank) if settings.get("use_rslora") is True else rank)
        reader = FiniteReader(folder)
        halves: dict[str, dict[str, torch.Tensor]] = {}
        for name in sorted(reader.names()):
            try:
                halves.setdefault(hf_weight(name), {})[name.removesuffix(".weight")[-1]] = reader(name)
            except ValueError:
                raise ArtifactError(
                    "the adapter has a tensor that PEFT does not name",
                    where=str(folder / WEIGHTS),
                    expected="base_model.model.….lora_A.weight and ….lora_B.weight",
                    found=name,
                ) from None
        for name, each in halves.items():
            if len(each) < 2:
                raise ArtifactError(f"half of the adapter of {name} is missing", where=str(folder / WEIGHTS))
        self.pairs = {name: (each["A"], each["B"]) for name, each in halves.items()}

    def added_to(
        self, read: Callable[[str], torch.Tensor], names: Collection[str], where: Path
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Hugging Face weights with the adapter in them. ArtifactError for a checkpoint that it does not fit."""
        for name, (linear_in, linear_out) in self.pairs.items():
            shape = tuple(read(name).shape) if name in names else None
            if shape != (linear_out.shape[0], linear_in.shape[1]):
                raise ArtifactError(
                    f"the adapter does not fit the checkpoint: {name}",
                    where=str(where),
                    expected=str((linear_out.shape[0], linear_in.shape[1])),
                    found="no such weight" if shape is None else str(shape),
                    hints=("--input base=PATH   # the checkpoint that it was trained on",),
                )
        for name in names:
            tensor, pair = require_finite(name, read(name), where), self.pairs.get(name)
            yield name, tensor if pair is None else low_rank_sum(tensor, *pair, self.scale)


def recorded_base(adapter: str | Path) -> str | None:
    """Path in base.json; None without that file. ArtifactError if it is not a JSON object."""
    file = Path(adapter) / BASE
    path: str | None = _read_json(file).get("path") if file.is_file() else None
    return path


def merge_adapter(adapter: str | Path, base: str | Path | None, target: str | Path) -> None:
    """An adapter and its base, a Hugging Face or Megatron checkpoint (None: the one in base.json) → a Hugging Face
    folder in the types of the base. ArtifactError when the base is not there, or does not fit."""
    from nemotron_steps.models.megatron_checkpoint import WEIGHTS as MEGATRON
    from nemotron_steps.models.megatron_checkpoint import is_megatron_checkpoint, load_megatron_weights

    found = AdapterFolder(adapter)
    base = recorded_base(adapter) if base is None else base
    if base is None or not Path(base).is_dir():
        raise ArtifactError(
            "the checkpoint that the adapter belongs to is not there",
            where=str(adapter),
            found=str(base or "no base.json"),
            hints=("--input base=PATH   # the checkpoint that it was trained on",),
        )
    base = Path(base)
    if is_megatron_checkpoint(base):
        architecture = Architecture.from_folder(base)
        weights = dict(to_hf(load_megatron_weights(base / MEGATRON, architecture), architecture))
        merged = found.added_to(weights.__getitem__, weights, base)
    else:
        reader = WeightReader(base)
        merged = found.added_to(reader, sorted(reader.names()), base)
    save_hf_checkpoint(target, merged, hf_folder(base))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ArtifactError("the adapter's file cannot be read", where=str(path), found=str(error)) from error
    if not isinstance(found, dict):
        raise ArtifactError("the file is not a JSON object", where=str(path), found=type(found).__name__)
    return found
