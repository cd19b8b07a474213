"""Adapter folders, as PEFT lays them out, and how one is added to the checkpoint that it was trained on.

    adapter_config.json          PEFT's LoraConfig
    adapter_model.safetensors    lora_A [r, in] and lora_B [out, r] of every projection
    base.json                    the checkpoint that it belongs to: path, artifact digest, fingerprint of its weights

PEFT and vLLM load the first two and leave the third alone. Folders that PEFT made itself have no base.json: whoever
merges one says what the base is.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemotron_steps.errors import ArtifactError, UnsupportedError
from nemotron_steps.models.adapters import hf_weight, low_rank_sum
from nemotron_steps.models.architecture import Architecture
from nemotron_steps.models.huggingface import FiniteReader, require_finite, save_hf_checkpoint
from nemotron_steps.models.initialize import as_umask_says

if TYPE_CHECKING:
    import torch

    from nemotron_steps.config.schema.peft import AdapterConfig

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
class AdapterBase:
    """The checkpoint that an adapter was trained on.

    Attributes:
        path: of its folder.
        digest: of the artifact that it is; empty where it is none.
    """

    path: str
    digest: str = ""


def save_adapter(
    folder: str | Path,
    tensors: Iterable[tuple[str, torch.Tensor]],
    frozen: Iterable[tuple[str, torch.Tensor]],
    config: AdapterConfig,
    base: AdapterBase,
    every: Collection[str],
) -> None:
    """Write an adapter folder.

    Args:
        tensors: PEFT-named.
        frozen: the Hugging Face weights that they are added to.
        every: names of all Hugging Face weights of the model.
    """
    from safetensors.torch import save_file

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    kept = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors}
    save_file(kept, str(folder / WEIGHTS), metadata={"format": "pt"})
    as_umask_says(folder / WEIGHTS)
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base.path,
        "r": config.dim,
        "lora_alpha": config.alpha,
        "lora_dropout": config.dropout,
        "target_modules": target_modules({hf_weight(name) for name in kept}, every),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
        "rank_pattern": {},
        "alpha_pattern": {},
    }
    _write_json(folder / CONFIG, settings)
    _write_json(folder / BASE, {"path": base.path, "digest": base.digest, "fingerprint": fingerprint(frozen)})


def target_modules(adapted: Collection[str], every: Collection[str]) -> list[str]:
    """What PEFT's config says of the weights that have an adapter: the last part of a module's name where all of that
    name do, else whole names."""
    found = set()
    for name in adapted:
        module = name.removesuffix(".weight")
        leaf = module.rpartition(".")[2]
        alike = [other for other in every if other.endswith(f".{leaf}.weight")]
        found.add(leaf if all(other in adapted for other in alike) else module)
    return sorted(found)


def fingerprint(weights: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Of the first row of each weight, in bfloat16: the same in every layout and precision of one model."""
    import torch

    rows = {name: tensor[0].detach().to("cpu", torch.bfloat16).view(torch.uint8) for name, tensor in weights}
    digest = hashlib.sha256()
    for name in sorted(rows):
        digest.update(name.encode() + rows[name].numpy().tobytes())
    return f"sha256:{digest.hexdigest()[:32]}"


class AdapterFolder:
    """An adapter on disk.

    Attributes:
        pairs: Hugging Face weight → its A and B, on CPU.
        scale: what B A is multiplied with.
        base: the path in base.json; None without that file.

    Raises:
        ArtifactError: it is incomplete.
        UnsupportedError: it is more than low-rank sums (DoRA, biases, whole layers, several ranks).
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        settings = _read_json(self.folder / CONFIG)
        _refuse_more(settings, self.folder / CONFIG)
        root = settings.get("use_rslora") is True
        self.scale = float(settings["lora_alpha"]) / (math.sqrt(settings["r"]) if root else settings["r"])
        reader = FiniteReader(self.folder)
        halves: dict[str, dict[str, torch.Tensor]] = {}
        for name in sorted(reader.names()):
            try:
                halves.setdefault(hf_weight(name), {})[name.removesuffix(".weight")[-1]] = reader(name)
            except ValueError:
                raise ArtifactError(
                    "the adapter has a tensor that is none of PEFT's",
                    where=str(self.folder / WEIGHTS),
                    expected="base_model.model.….lora_A.weight and ….lora_B.weight",
                    found=name,
                ) from None
        self.pairs = {name: (each["A"], each["B"]) for name, each in halves.items() if len(each) == 2}
        if len(self.pairs) < len(halves):
            alone = next(name for name in halves if name not in self.pairs)
            raise ArtifactError(f"half of the adapter of {alone} is missing", where=str(self.folder / WEIGHTS))
        self.base = recorded_base(self.folder)
        self._fingerprint = _recorded(self.folder).get("fingerprint")

    def check_base(self, read: Callable[[str], torch.Tensor], names: Collection[str], where: Path) -> None:
        """Refuse a checkpoint that the adapter does not fit, or was not trained on."""
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
        if self._fingerprint not in (None, fingerprint((name, read(name)) for name in self.pairs)):
            raise ArtifactError(
                "the checkpoint is not the one that the adapter was trained on",
                where=str(where),
                expected=f"the weights of {self.base}",
                found="others of the same shapes",
                hints=(f"--input base={self.base}",),
            )

    def added_to(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Hugging Face weights with the adapter in them."""
        for name, tensor in weights:
            pair = self.pairs.get(name)
            yield name, tensor if pair is None else low_rank_sum(tensor, *pair, self.scale)


def recorded_base(adapter: str | Path) -> str | None:
    """Path of the checkpoint that an adapter names as its own; None without base.json. ArtifactError if that is no JSON
    object."""
    path: str | None = _recorded(Path(adapter)).get("path")
    return path


def _recorded(adapter: Path) -> dict[str, Any]:
    return _read_json(adapter / BASE) if (adapter / BASE).is_file() else {}


def merge_adapter(adapter: str | Path, base: str | Path | None, target: str | Path) -> None:
    """An adapter and its base → a Hugging Face folder, in the types of the base.

    Args:
        base: a Hugging Face or Megatron checkpoint; None for the one in base.json.

    Raises:
        ArtifactError: the base is not there, or another one.
    """
    from nemotron_steps.models.mapping import to_hf
    from nemotron_steps.models.megatron_checkpoint import WEIGHTS as MEGATRON
    from nemotron_steps.models.megatron_checkpoint import is_megatron_checkpoint, load_megatron_weights

    found = AdapterFolder(adapter)
    base = found.base if base is None else base
    if base is None or not Path(base).is_dir():
        raise ArtifactError(
            "the checkpoint that the adapter belongs to is not there",
            where=str(adapter),
            expected="a checkpoint folder",
            found=str(base or "no base.json"),
            hints=("--input base=PATH   # the checkpoint that it was trained on",),
        )
    base = Path(base)
    if is_megatron_checkpoint(base):
        architecture = Architecture.from_folder(base)
        weights = dict(to_hf(load_megatron_weights(base / MEGATRON, architecture), architecture))
        finite = ((name, require_finite(name, tensor, base)) for name, tensor in weights.items())
        found.check_base(weights.__getitem__, weights, base)
        save_hf_checkpoint(target, found.added_to(finite), base / "hf")
    else:
        reader = FiniteReader(base)
        found.check_base(reader, reader.names(), base)
        save_hf_checkpoint(target, found.added_to((name, reader(name)) for name in sorted(reader.names())), base)


def _refuse_more(settings: dict[str, Any], where: Path) -> None:
    more = {
        key: value
        for key, value in settings.items()
        if value and key not in _SAYS_NOTHING and value not in _PLAIN.get(key, ())
    }
    if settings.get("peft_type") != "LORA":
        more["peft_type"] = settings.get("peft_type")
    if more:
        raise UnsupportedError(
            "the adapter is more than one low-rank sum a projection",
            where=str(where),
            expected="a plain LoRA adapter of one rank",
            found="; ".join(f"{key}: {value}" for key, value in more.items()),
            hints=("merge it with PEFT's merge_and_unload, and use the checkpoint",),
        )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ArtifactError("the adapter's file cannot be read", where=str(path), found=str(error)) from error
    if not isinstance(found, dict):
        raise ArtifactError("the file is not a JSON object", where=str(path), found=type(found).__name__)
    return found


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
