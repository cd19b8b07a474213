"""What a decoder-only language model is, read from a Hugging Face config.json. Each family's own keys are read in
families/. A config that asks for something this package does not compute (sliding windows, MLP biases, other
activations) is refused there, by name, instead of being computed wrongly later."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemotron_steps.config.families import FAMILIES, bounds_time_steps
from nemotron_steps.config.layout.model_spec import ModelSpec
from nemotron_steps.errors import ArtifactError, UnsupportedError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class RopeScaling:
    """Rotary position scaling under the names of Hugging Face's `rope_parameters`."""

    rope_type: str
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True


@dataclass(frozen=True)
class Mamba2:
    """Sizes of a Mamba-2 mixer (Dao and Gu 2024, "Transformers are SSMs"), the same in every layer that has one.
    `num_groups` of heads share B and C; `chunk_size` changes the order of sums, nothing else; `time_step_limit` holds
    after softplus."""

    num_heads: int
    head_dim: int
    state_size: int
    num_groups: int
    conv_kernel: int
    chunk_size: int
    time_step_limit: tuple[float, float] = (0.0, math.inf)
    conv_bias: bool = True

    @property
    def inner_size(self) -> int:
        """Rows of x, and of the gate z."""
        return self.num_heads * self.head_dim

    @property
    def conv_channels(self) -> int:
        """Channels of the convolution: x, B and C."""
        return self.inner_size + 2 * self.num_groups * self.state_size

    @property
    def in_proj_rows(self) -> int:
        """Rows of the input projection: z, x, B, C and one time step a head."""
        return self.inner_size + self.conv_channels + self.num_heads


@dataclass(frozen=True)
class Architecture:
    """Shape of a decoder-only model of one of the families. Sizes are in elements; `ffn_hidden_size` is the dense MLP's
    inner size, `moe_ffn_hidden_size` one expert's."""

    family: str
    hidden_size: int
    num_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    ffn_hidden_size: int
    vocab_size: int
    rope_theta: float
    norm_eps: float
    max_position_embeddings: int
    rope_scaling: RopeScaling | None = None
    qk_norm: bool = False
    qkv_bias: bool = False
    tied_embeddings: bool = False
    initializer_range: float = 0.02
    num_experts: int = 0
    experts_per_token: int = 0
    moe_ffn_hidden_size: int = 0
    norm_topk_prob: bool = False
    router_bias: bool = False  # experts are chosen by score plus a learned bias
    pattern: str = ""  # a letter a layer, one mixer each (config/families.py); empty: attention, then an MLP or experts
    mamba: Mamba2 | None = None
    activation: str = "swiglu"  # or relu2: relu(x)² of the up projection, without a gate
    rotary: bool = True  # false: attention knows no positions
    router_score: str = "softmax"  # or sigmoid: each expert's score is its own, and the router has a bias
    router_groups: int = 1
    router_top_groups: int = 1  # of the router's groups of experts, how many a token may choose from
    routed_scaling_factor: float = 1.0
    shared_ffn_hidden_size: int = 0  # of the expert that every token goes through; 0 for none
    moe_latent_size: int = 0  # width in which the routed experts work, between two projections; 0 for the model's own
    mtp_pattern: str = ""
    mtp_layers: int = 0  # blocks of multi-token prediction, each with a layer for every letter of `mtp_pattern`
    trains_mtp: bool = False  # whether those are parameters; otherwise their tensors travel along unread

    @property
    def is_moe(self) -> bool:
        """Whether the MLPs are mixtures of experts."""
        return self.num_experts > 0

    @property
    def mixtures(self) -> tuple[int, ...]:
        """Layers that have experts, from 0."""
        kinds = self.pattern or "E" * self.num_layers
        return tuple(layer for layer, kind in enumerate(kinds) if kind == "E") if self.is_moe else ()

    @property
    def is_hybrid(self) -> bool:
        """Whether layers have one mixer each, as `pattern` says."""
        return bool(self.pattern)

    @property
    def query_heads_per_group(self) -> int:
        """Query heads that share one key-value head."""
        return self.num_attention_heads // self.num_key_value_heads

    @property
    def positions(self) -> int:
        """Longest sequence that the position embedding was made for, scaling included."""
        scaling = self.rope_scaling
        if scaling is None or scaling.rope_type not in ("yarn", "linear"):
            return self.max_position_embeddings
        original = scaling.original_max_position_embeddings or self.max_position_embeddings
        return max(self.max_position_embeddings, int(original * scaling.factor))

    @property
    def facts(self) -> ModelSpec:
        """What a parallel layout depends on."""
        return ModelSpec(
            self.family,
            layers=self.num_layers,
            attention_heads=self.num_attention_heads,
            key_value_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            experts=self.num_experts,
            mlp_width=self.moe_ffn_hidden_size if self.is_moe else self.ffn_hidden_size,
            shared_width=math.gcd(self.shared_ffn_hidden_size, self.ffn_hidden_size if "-" in self.pattern else 0)
            if self.shared_ffn_hidden_size
            else None,
            mamba_heads=None if self.mamba is None else self.mamba.num_heads,
            mamba_groups=None if self.mamba is None else self.mamba.num_groups,
            bounds_time_steps=self.mamba is not None and bounds_time_steps(self.mamba.time_step_limit),
            positions=self.positions,
            # Sizes of experts and of Mamba-2 are read where the model itself has such layers.
            mtp_layers=self.mtp_layers if set(self.mtp_pattern) <= {*self.pattern, "*", "-"} else 0,
        )

    @classmethod
    def from_folder(cls, folder: str | Path) -> Architecture:
        """Read `config.json` of a Hugging Face folder, or `hf/config.json` of a Megatron checkpoint."""
        path = hf_folder(folder) / "config.json"
        config = read_config(path)
        modelopt = path.with_name("hf_quant_config.json")  # not every config.json repeats what it says
        if modelopt.is_file():
            raise quantised(f"{modelopt.name} beside config.json", str(path.parent))
        return cls.from_config(config, where=str(path))

    @classmethod
    def from_config(cls, config: Mapping[str, Any], where: str = "config.json") -> Architecture:
        """Read a parsed config.json, old (`rope_theta`) or new (`rope_parameters`) style. UnsupportedError when the
        model needs something this package does not compute, ArtifactError when a required key is missing or
        malformed."""
        family = config.get("model_type")
        if not isinstance(family, str) or family not in FAMILIES:
            known = " | ".join(FAMILIES)
            raise UnsupportedError(
                "this model family has no Megatron mapping", where=where, expected=known, found=str(family)
            )
        quantisation = config.get("quantization_config")
        if quantisation:
            method = quantisation.get("quant_method") if isinstance(quantisation, Mapping) else None
            raise quantised(f"quantization_config{f' of {method}' if method else ''}", where)
        from nemotron_steps.models.families import ConfigValues, module_of

        architecture: Architecture = module_of(family).read(config, where)
        if architecture.num_attention_heads % architecture.num_key_value_heads:
            what = "attention heads do not divide evenly over key-value heads"
            expected = f"a multiple of {architecture.num_key_value_heads}"
            raise ConfigValues(config, where).refusal(what, expected, str(architecture.num_attention_heads))
        return architecture


def quantised(found: str, where: str | None = None) -> UnsupportedError:
    """The refusal of a checkpoint whose weights are not plain numbers; `where`: its folder, or its config.json."""
    folder = str(where).removesuffix("/config.json") if where is not None else "MODEL"
    whole = shlex.quote(f"{folder}-BF16")
    return UnsupportedError(
        "the checkpoint is quantised, and only whole weights can be converted and trained",
        where=where,
        expected="bfloat16, float16 or float32 weights",
        found=found,
        hints=(f"hf download MODEL-BF16 --local-dir {whole}   # the checkpoint that this one was quantised from",),
    )


def facts_of(folder: str | Path) -> ModelSpec | None:
    """What a layout depends on, of a checkpoint folder; None for families that only transformers knows. Raises as
    Architecture.from_config."""
    path = hf_folder(folder) / "config.json"
    config = read_config(path)
    known = str(config.get("model_type")) in FAMILIES
    return Architecture.from_config(config, where=str(path)).facts if known else None


def hf_folder(folder: str | Path) -> Path:
    """The folder that holds config.json and the tokenizer: `folder` itself, or its `hf/` for Megatron checkpoints."""
    nested = Path(folder) / "hf"
    return nested if nested.is_dir() else Path(folder)


def read_config(path: Path) -> dict[str, Any]:
    """Parse a config.json. Raises ArtifactError if it is missing or not a JSON object."""
    folder = shlex.quote(str(path.parent))
    published = (f"hf download MODEL config.json --local-dir {folder}   # as it was published",)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ArtifactError("the checkpoint has no config.json", where=str(path.parent), hints=published) from error
    except (ValueError, RecursionError) as error:  # no JSON, no UTF-8, more digits or more levels than Python reads
        place = f"{path}:{error.lineno}" if isinstance(error, json.JSONDecodeError) else str(path)
        raise ArtifactError("config.json is not JSON", where=place, found=str(error), hints=published) from error
    if not isinstance(config, dict):
        found = type(config).__name__
        raise ArtifactError("config.json is not an object", where=str(path), found=found, hints=published)
    return config


# Rotary frequencies, float32 on CPU. Formulas: RoFormer (arXiv 2104.09864), YaRN (arXiv 2309.00071), and the Llama 3.1
# release for `llama3`, in the order of Hugging Face's models, so that converted checkpoints agree to rounding.


def inverse_frequencies(architecture: Architecture) -> tuple[torch.Tensor, float]:
    """Inverse frequencies float32 [head_dim / 2], and the factor that multiplies cos and sin."""
    import torch

    dim, theta = architecture.head_dim, architecture.rope_theta
    plain = 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.int64).to(torch.float32) / dim))
    scaling = architecture.rope_scaling
    if scaling is None:
        return plain, 1.0
    if scaling.rope_type == "linear":
        return plain / scaling.factor, 1.0
    original = scaling.original_max_position_embeddings
    assert original is not None
    if scaling.rope_type == "yarn":
        return _yarn(plain, scaling, original, dim, theta)
    wavelength, low, high = 2 * math.pi / plain, scaling.low_freq_factor, scaling.high_freq_factor
    scaled = torch.where(wavelength > original / low, plain / scaling.factor, plain)
    smooth = (original / wavelength - low) / (high - low)
    smoothed = (1 - smooth) * scaled / scaling.factor + smooth * scaled
    is_medium = ~(wavelength < original / high) & ~(wavelength > original / low)
    return torch.where(is_medium, smoothed, scaled), 1.0


def cos_sin(architecture: Architecture, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin float32 [length, head_dim] of positions 0 … length − 1, for the rotate-half convention."""
    import torch

    frequencies, factor = inverse_frequencies(architecture)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos() * factor, angles.sin() * factor


def _yarn(
    plain: torch.Tensor, scaling: RopeScaling, original: int, dim: int, theta: float
) -> tuple[torch.Tensor, float]:
    import torch

    def correction_dim(rotations: float) -> float:
        return (dim * math.log(original / (rotations * 2 * math.pi))) / (2 * math.log(theta))

    low, high = correction_dim(scaling.beta_fast), correction_dim(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # the ramp below divides by the difference
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    extrapolation = 1 - ramp
    frequencies = (plain / scaling.factor) * (1 - extrapolation) + plain * extrapolation

    if scaling.attention_factor is not None:
        return frequencies, scaling.attention_factor
    return frequencies, 1.0 if scaling.factor <= 1 else 0.1 * math.log(scaling.factor) + 1.0
