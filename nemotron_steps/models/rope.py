"""Rotary position frequencies of every supported scaling, in float32 on CPU. Formulas: RoFormer (arXiv 2104.09864),
YaRN (arXiv 2309.00071), and the Llama 3.1 release for `llama3`, in the order of Hugging Face's models, so that
converted checkpoints agree to rounding."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from nemotron_steps.models.architecture import Architecture, RopeScaling


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
