"""Rotary frequencies under every scaling, against transformers'."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nemotron_steps.models.architecture import Architecture
from nemotron_steps.models.rope import inverse_frequencies
from tests.models.checkpoints import SIZES

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 2.0},
        {**LLAMA3, "original_max_position_embeddings": 64},
        {**LLAMA3, "original_max_position_embeddings": 8192},
        YARN,
        {**YARN, "truncate": False},
        {**YARN, "original_max_position_embeddings": 4096, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
        {**YARN, "attention_factor": 1.25},
        {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3},
        # Past half of the head's size even the slowest pair turns often: the ramp ends behind the last of them.
        {**YARN, "original_max_position_embeddings": 2**20},
    ],
    ids=lambda scaling: "-".join(str(value) for value in scaling.values()),
)
def test_scaled_frequencies_are_those_of_transformers(scaling: dict[str, Any]) -> None:
    from transformers import Qwen3Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {"rope_theta": 10000.0, **scaling}
    config = Qwen3Config(**{**SIZES, "head_dim": 64}, rope_parameters=parameters)
    frequencies, factor = inverse_frequencies(Architecture.from_config(config.to_dict()))
    expected, expected_factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, torch.device("cpu"))
    torch.testing.assert_close(frequencies, expected, rtol=1e-6, atol=0)
    assert factor == pytest.approx(expected_factor, rel=1e-6)
