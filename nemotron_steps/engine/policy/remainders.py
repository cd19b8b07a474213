"""float32 master weights in the space of bfloat16: a bfloat16 weight and the 16 bits that it lacks.

The weight is the master rounded to nearest (ties upwards), so the missing bits are a signed distance, and the two
give the master back exactly. The scheme is Transformer Engine's `store_param_remainders`.
"""

from __future__ import annotations

import torch


def split_float32(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 → (bfloat16 weights, int16 remainders), both of its shape."""
    bits = master.contiguous().view(torch.int32)
    weights = ((bits + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)
    return weights, bits.to(torch.int16)  # the low half, as a signed number


def join_float32(weights: torch.Tensor, remainders: torch.Tensor) -> torch.Tensor:
    """The inverse of `split_float32`."""
    high = weights.contiguous().view(torch.int16).to(torch.int32) << 16
    return (high + remainders.to(torch.int32)).view(torch.float32)
