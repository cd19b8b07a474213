"""Low-rank adapters of a model: which linear layers have one, and its two parameters in either world.

    Megatron        decoder.layers.0.mlp.linear_fc1.adapter.linear_in.weight    A [r, in]
                    decoder.layers.0.mlp.linear_fc1.adapter.linear_out.weight   B [out, r]
    Hugging Face    base_model.model.model.layers.0.mlp.gate_proj.lora_A.weight, ….lora_B.weight, …up_proj…

A fused linear has one adapter. For PEFT it is one a projection: each has a copy of A and its own rows of B, which is
exact. B is laid out and cut as its linear's rows are, A as its columns. Not here: files (adapter_folder.py) and modules
(engine/policy/lora.py).
"""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nemotron_steps.errors import ConfigError
from nemotron_steps.models.architecture import Architecture
from nemotron_steps.models.mapping import Parameter, megatron_shape, of_mtp, parameters

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
    linears = {p.name.removesuffix(".weight"): p for p in parameters(architecture) if _is_linear(p, architecture)}
    wanted = config.target_modules or tuple(dict.fromkeys(name.rpartition(".")[2] for name in linears))
    for pattern in (*config.target_modules, *config.exclude_modules):
        if not any(_matches(name, pattern) for name in linears):
            raise ConfigError(
                f"the model has no linear layer '{pattern}'",
                where=f"{key}.{'target' if config.target_modules else 'exclude'}_modules",
                expected=", ".join(sorted({name.rpartition(".")[2] for name in linears})),
                found=pattern,
                hints=(f"{key}.target_modules={_listed(_supported(linears))}{_none_excluded(config, key)}",),
            )
    chosen = [
        name
        for name in linears
        if any(_matches(name, pattern) for pattern in wanted)
        and not any(_matches(name, pattern) for pattern in config.exclude_modules)
    ]
    without = [name for name in chosen if not _takes_adapter(linears[name])]
    if without:
        raise ConfigError(
            f"{without[0]} cannot have an adapter: experts and routers are not supported",
            where=f"{key}.target_modules",
            expected=f"some of {', '.join(_supported(linears))}",
            found=_listed(wanted),
            hints=(f"{key}.target_modules={_listed(_supported(linears))}{_none_excluded(config, key)}",),
        )
    if not chosen:
        raise ConfigError(
            "no linear layer is left to have an adapter",
            where=f"{key}.exclude_modules",
            hints=(f"{key}.exclude_modules=[]",),
        )
    return tuple(_pair(linears[name], config.dim) for name in chosen)


def lora_candidates(architecture: Architecture) -> list[str]:
    """What of a model are linear layers in transformers, as `lora_modules` takes them; routers and experts are none."""
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
    patterns = config.target_modules or config.exclude_modules
    leaves = sorted({name.rpartition(".")[2] for name in linears})
    for pattern in patterns:
        if not any(_matches(name, pattern) for name in linears):
            raise ConfigError(
                f"the model has no linear layer '{pattern}'",
                where=_LORA_KEY,
                expected=", ".join(leaves),
                found=pattern,
                hints=(
                    f"{_LORA_KEY}.target_modules=[] {_LORA_KEY}.exclude_modules=[] {_LORA_KEY}.match_all_linear=true",
                ),
            )
    found = [
        name
        for name in linears
        if (config.match_all_linear or any(_matches(name, pattern) for pattern in config.target_modules))
        and not any(_matches(name, pattern) for pattern in config.exclude_modules)
    ]
    without = sorted({name.rpartition(".")[2] for name in found} & set(_READ_BY_OTHERS))
    if without or not found:
        others = [leaf for leaf in leaves if leaf not in _READ_BY_OTHERS]
        raise ConfigError(
            f"{', '.join(without)} cannot have adapters: routers and Mamba-2 are not supported"
            if without
            else "no linear layer is left to have an adapter",
            where=f"{_LORA_KEY}.target_modules",
            expected=", ".join(others),
            found=", ".join(without) or "none",
            hints=(
                f"{_LORA_KEY}.match_all_linear=false {_LORA_KEY}.target_modules=[{','.join(others)}]"
                f"{_none_excluded(config, _LORA_KEY)}",
            ),
        )
    return found


def low_rank_sum(weight: torch.Tensor, linear_in: torch.Tensor, linear_out: torch.Tensor, scale: float) -> torch.Tensor:
    """weight + scale · B A, computed in float32, in the type of the weight."""
    return (weight.float() + scale * (linear_out.float() @ linear_in.float())).to(weight.dtype)


def peft_name(hf_name: str, letter: str) -> str:
    """What PEFT calls the `A` or `B` of a Hugging Face weight."""
    return f"{_PEFT}{hf_name.removesuffix('.weight')}.lora_{letter}.weight"


def hf_weight(name: str) -> str:
    """The Hugging Face weight that a PEFT tensor belongs to. ValueError for a name that is none of PEFT's."""
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


def _is_linear(parameter: Parameter, architecture: Architecture) -> bool:
    if parameter.layer is None or of_mtp(parameter, architecture) or not parameter.name.endswith(".weight"):
        return False
    return parameter.name.removesuffix(".weight").rpartition(".")[2] in (*LINEARS, *_OTHERS)


def _takes_adapter(parameter: Parameter) -> bool:
    leaf = parameter.name.removesuffix(".weight").rpartition(".")[2]
    dense = not parameter.of_experts and "experts" not in parameter.name
    return leaf in LINEARS and dense


def _supported(linears: dict[str, Parameter]) -> list[str]:
    """Leaf names of which every linear may have an adapter."""
    leaves = dict.fromkeys(name.rpartition(".")[2] for name in linears)
    return [leaf for leaf in leaves if all(_takes_adapter(p) for n, p in linears.items() if n.endswith(f".{leaf}"))]


def _none_excluded(config: AdapterConfig, key: str) -> str:
    """What a hint that sets target_modules has to take back beside it: the two together are refused."""
    return f" {key}.exclude_modules=[]" if config.exclude_modules else ""


def _matches(name: str, pattern: str) -> bool:
    return name.rpartition(".")[2] == pattern or fnmatch.fnmatchcase(name, pattern)


def _listed(names: Iterable[str]) -> str:
    return f"[{','.join(names)}]"
