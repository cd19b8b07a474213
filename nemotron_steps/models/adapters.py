"""Low-rank adapters of a model: which linear layers have one, its two parameters in either world, and its folder.

    Megatron        decoder.layers.0.mlp.linear_fc1.adapter.linear_in.weight    A [r, in]
                    decoder.layers.0.mlp.linear_fc1.adapter.linear_out.weight   B [out, r]
    Hugging Face    base_model.model.model.layers.0.mlp.gate_proj.lora_A.weight, ….lora_B.weight, …up_proj…

A fused linear has one adapter. For PEFT it is one a projection: each has a copy of A and its own rows of B, which is
exact. B is laid out and cut as its linear's rows are, A as its columns. A folder is as PEFT lays it out:

    adapter_config.json          PEFT's LoraConfig
    adapter_model.safetensors    lora_A [r, in] and lora_B [out, r] of every projection
    base.json                    the checkpoint that it belongs to: path, artifact digest, fingerprint of its weights

Folders that PEFT made itself have no base.json: whoever merges one says what the base is.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemotron_steps.errors import ArtifactError, ConfigError, UnsupportedError
from nemotron_steps.models.architecture import Architecture
from nemotron_steps.models.huggingface import FiniteReader, require_finite, save_hf_checkpoint
from nemotron_steps.models.initialize import as_umask_says
from nemotron_steps.models.mapping import Parameter, megatron_shape, of_mtp, parameters, to_hf

if TYPE_CHECKING:
    import torch

    from nemotron_steps.config.schema.peft import AdapterConfig, LoraConfig

LINEARS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "in_proj", "out_proj")
"""What may have an adapter, by the last part of its name."""
_OTHERS = ("router", "fc1_latent_proj", "fc2_latent_proj")
"""Linear layers that have none here."""
_LORA_KEY = "policy.dtensor_cfg.lora_cfg"
_READ_BY_OTHERS = ("in_proj", "out_proj", "gate")
"""Of transformers' linears, those whose weights other modules read, past the linear itself: Mamba-2's and routers."""
_PEFT = "base_model.model."
_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Projections that are one module in vLLM."""
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
    """An adapter's parameters, and the weight that they are added to."""

    base: Parameter
    linear_in: Parameter
    """A."""
    linear_out: Parameter
    """B."""

    @property
    def module(self) -> str:
        """The linear's name in the whole model."""
        return self.base.name.removesuffix(".weight")


def adapter_pairs(architecture: Architecture, config: AdapterConfig, *, key: str) -> tuple[AdapterPair, ...]:
    """The adapters that a config asks for, in the order of the layers.

    Args:
        key: the config's own dotted key, for messages.

    Raises:
        ConfigError: a name matches no linear layer, or one that has no adapter here: experts, routers.
    """
    weights = [p for p in parameters(architecture) if p.layer is not None and p.name.endswith(".weight")]
    named = {p.name.removesuffix(".weight"): p for p in weights if not of_mtp(p, architecture)}
    linears = {name: p for name, p in named.items() if name.rpartition(".")[2] in (*LINEARS, *_OTHERS)}
    wanted = config.target_modules or tuple(dict.fromkeys(name.rpartition(".")[2] for name in linears))
    mend = f"{key}.target_modules={_listed(_supported(linears))}{_none_excluded(config, key)}"
    place = f"{key}.{'target' if config.target_modules else 'exclude'}_modules"
    _require_known((*config.target_modules, *config.exclude_modules), linears, place, mend)
    chosen = _matching(linears, wanted, but=config.exclude_modules)
    without = [name for name in chosen if not _takes_adapter(linears[name])]
    if without:
        raise ConfigError(
            f"{without[0]} cannot have an adapter: experts and routers are not supported",
            where=f"{key}.target_modules",
            expected=f"some of {', '.join(_supported(linears))}",
            found=_listed(wanted),
            hints=(mend,),
        )
    if not chosen:
        none_excluded = (f"{key}.exclude_modules=[]",)
        raise ConfigError(
            "no linear layer is left to have an adapter", where=f"{key}.exclude_modules", hints=none_excluded
        )
    return tuple(_pair(linears[name], config.dim) for name in chosen)


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
    """The linear layers of a transformers model that have an adapter under the dtensor policy.

    Args:
        linears: names of all that the model has.

    Raises:
        ConfigError: a name matches no linear layer, or one that cannot have an adapter; or none is left.
    """
    linears = list(linears)
    mend = f"{_LORA_KEY}.target_modules=[] {_LORA_KEY}.exclude_modules=[] {_LORA_KEY}.match_all_linear=true"
    _require_known(config.target_modules or config.exclude_modules, linears, _LORA_KEY, mend)
    leaves = sorted({name.rpartition(".")[2] for name in linears})
    found = _matching(linears, ("*",) if config.match_all_linear else config.target_modules, but=config.exclude_modules)
    without = sorted({name.rpartition(".")[2] for name in found} & set(_READ_BY_OTHERS))
    if without or not found:
        others = [leaf for leaf in leaves if leaf not in _READ_BY_OTHERS]
        cannot = f"{', '.join(without)} cannot have adapters: routers and Mamba-2 are not supported"
        named = f"{_LORA_KEY}.match_all_linear=false {_LORA_KEY}.target_modules={_listed(others)}"
        raise ConfigError(
            cannot if without else "no linear layer is left to have an adapter",
            where=f"{_LORA_KEY}.target_modules",
            expected=", ".join(others),
            found=", ".join(without) or "none",
            hints=(f"{named}{_none_excluded(config, _LORA_KEY)}",),
        )
    return found


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


def whole_modules(adapted: Collection[str], every: Collection[str]) -> bool:
    """Whether some Hugging Face-named weights are all that vLLM's modules of them hold.

    vLLM fuses projections, and loads a module whole: what does not come with a part of it is lost.

    Args:
        adapted: the weights.
        every: those of the whole model, biases too.
    """
    for name in adapted:
        module, _, leaf = name.removesuffix(".weight").rpartition(".")
        fused = next((group for group in _FUSED if leaf in group), (leaf,))
        parts = {f"{module}.{each}.{part}" for each in fused for part in ("weight", "bias")}
        if any(part in every and part not in adapted for part in parts):
            return False
    return True


def is_half(name: str) -> bool:
    """Whether a name is PEFT's of an `A` or a `B`."""
    return name.startswith(_PEFT) and name.endswith((".lora_A.weight", ".lora_B.weight"))


def _pair(base: Parameter, dim: int) -> AdapterPair:
    stem = base.name.removesuffix(".weight") + ".adapter"
    columns = megatron_shape(base)[1]
    linear_in = Parameter(
        f"{stem}.linear_in.weight",
        (peft_name(base.hf_names[0], "A"),),
        ((dim, columns),),
        tp_dim=1 if base.tp_dim == 1 else None,
        layer=base.layer,
    )
    linear_out = Parameter(
        f"{stem}.linear_out.weight",
        tuple(peft_name(name, "B") for name in base.hf_names),
        tuple((shape[0], dim) for shape in base.hf_shapes),
        base.layout,
        0 if base.tp_dim == 0 else None,
        base.layer,
        parts=base.parts,
    )
    return AdapterPair(base, linear_in, linear_out)


def _takes_adapter(parameter: Parameter) -> bool:
    leaf = parameter.name.removesuffix(".weight").rpartition(".")[2]
    return leaf in LINEARS and "experts" not in parameter.name


def _supported(linears: dict[str, Parameter]) -> list[str]:
    """Leaf names of which every linear may have an adapter."""
    leaves = dict.fromkeys(name.rpartition(".")[2] for name in linears)
    return [leaf for leaf in leaves if all(_takes_adapter(p) for n, p in linears.items() if n.endswith(f".{leaf}"))]


def _none_excluded(config: AdapterConfig, key: str) -> str:
    """What a hint that sets target_modules has to take back beside it: the two together are refused."""
    return f" {key}.exclude_modules=[]" if config.exclude_modules else ""


def _require_known(patterns: Iterable[str], linears: Collection[str], where: str, mend: str) -> None:
    """ConfigError for a pattern that matches no linear layer."""
    for pattern in patterns:
        if not _matching(linears, (pattern,)):
            raise ConfigError(
                f"the model has no linear layer '{pattern}'",
                where=where,
                expected=", ".join(sorted({name.rpartition(".")[2] for name in linears})),
                found=pattern,
                hints=(mend,),
            )


def _matching(names: Iterable[str], patterns: Iterable[str], *, but: Iterable[str] = ()) -> list[str]:
    def matches(name: str, patterns: Iterable[str]) -> bool:
        return any(name.rpartition(".")[2] == each or fnmatch.fnmatchcase(name, each) for each in patterns)

    return [name for name in names if matches(name, patterns) and not matches(name, but)]


def _listed(names: Iterable[str]) -> str:
    return f"[{','.join(names)}]"


@dataclass(frozen=True)
class AdapterBase:
    """The checkpoint that an adapter was trained on.

    Attributes:
        path: of its folder.
        digest: of the artifact that it is; empty for a plain folder.
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
    settings: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base.path,
        "r": config.dim,
        "lora_alpha": config.alpha,
        "lora_dropout": config.dropout,
        "target_modules": target_modules({hf_weight(name) for name in kept}, every),
        "bias": "none",
        "inference_mode": True,
        "modules_to_save": None,
        **dict.fromkeys(("fan_in_fan_out", "use_rslora", "use_dora"), False),
        "rank_pattern": {},
        "alpha_pattern": {},
    }
    origin = {"path": base.path, "digest": base.digest, "fingerprint": fingerprint(frozen)}
    for name, content in ((CONFIG, settings), (BASE, origin)):
        (folder / name).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


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
                    "the adapter has a tensor that PEFT does not name",
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
    """Path in base.json; None without that file. ArtifactError if it is not a JSON object."""
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
