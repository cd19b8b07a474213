"""A key that config.json lacks is transformers' default, of every family."""

from __future__ import annotations

from typing import Any

import pytest

from nemotron_steps.config.families import FAMILIES
from nemotron_steps.errors import ArtifactError
from nemotron_steps.models.architecture import Architecture
from tests.models.defaults import REQUIRED


@pytest.mark.parametrize("family", FAMILIES)
def test_a_key_that_is_not_there_is_transformers_default(family: str) -> None:
    from transformers import AutoConfig

    bare: dict[str, Any] = {"model_type": family, **REQUIRED[family]}
    full = AutoConfig.for_model(**bare).to_dict()
    architecture = Architecture.from_config(full)
    assert Architecture.from_config(bare) == architecture
    assert REQUIRED[family].keys() < full.keys()
    for key in full.keys() - {"model_type"}:
        rest = {name: value for name, value in full.items() if name != key}
        if key not in REQUIRED[family]:
            assert Architecture.from_config(rest) == architecture, key
            continue
        with pytest.raises(ArtifactError, match="lacks "):
            Architecture.from_config(rest)


@pytest.mark.parametrize("rope", ["linear", "yarn", "llama3"])
def test_a_scaling_without_its_factor_is_refused_as_in_transformers(rope: str) -> None:
    stated = {"rope_type": rope, "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    bare = {"model_type": "llama", **REQUIRED["llama"]}
    Architecture.from_config({**bare, "rope_parameters": stated})
    del stated["factor"]
    with pytest.raises(ArtifactError, match=r"lacks rope_parameters\.factor"):
        Architecture.from_config({**bare, "rope_parameters": stated})
