"""What the steps that train without generating ask for before they read a model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nemotron_steps.config.schema.dpo import DpoConfig
from nemotron_steps.config.schema.sft import SftConfig
from nemotron_steps.errors import ConfigError
from nemotron_steps.runs.context import plain_context
from nemotron_steps.steps import supervised

BASE = {"policy": {"checkpoint": "base"}}


@pytest.mark.parametrize(
    ("step", "config", "where", "hint"),
    [
        (supervised.sft_megatron_bridge, SftConfig(), "policy.checkpoint", "--input model=PATH"),
        (supervised.sft_megatron_bridge, SftConfig.model_validate(BASE), "data.train.data_path", "--input chats=PATH"),
        (supervised.sft_automodel, SftConfig(), "policy.dtensor_cfg.enabled", "policy.dtensor_cfg.enabled=true"),
        (supervised.dpo, DpoConfig(), "policy", "--input policy=PATH"),
        (supervised.dpo, DpoConfig.model_validate(BASE), "preferences", "--input preferences=PATH"),
    ],
)
def test_a_step_asks_for_what_it_lacks(
    step: Callable[[Any], None], config: Any, where: str, hint: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        step(plain_context(config, tmp_path, outputs={"model": "checkpoint_megatron"}))
    assert (caught.value.where, caught.value.hints[0]) == (where, hint)
