"""Pieces of a layer in every precision."""

from __future__ import annotations

import pytest
import torch

from nemotron_steps.engine.kernels.fused import rms_norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(6,), (2, 6)], ids=str)
def test_eps_is_added_to_the_mean_square(shape, dtype):
    states, weight = torch.full((4, 2, 6), 1e-3, dtype=dtype), torch.full(shape, 2.0, dtype=dtype)
    found = rms_norm(states, weight, 3e-6)
    assert found.dtype is dtype
    torch.testing.assert_close(found.float(), torch.ones(4, 2, 6), atol=0.01, rtol=0)
