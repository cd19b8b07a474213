"""What the training steps refuse before any step of a run starts."""

from __future__ import annotations

import pytest

from nemotron_steps.config.schema.rl import RlConfig
from nemotron_steps.errors import ConfigError, DataError
from nemotron_steps.steps.rl import preflight


def test_prompts_that_an_earlier_step_will_make_replace_those_of_the_config():
    config = RlConfig.model_validate({"data": {"train": {"data_path": "nowhere.jsonl"}}})
    preflight.check(config, {"prompts": None})
    with pytest.raises(DataError, match="no such prompt file"):
        preflight.check(config, {})


def test_a_run_without_prompts_is_refused():
    with pytest.raises(ConfigError, match="no training prompts"):
        preflight.check(RlConfig(), {})
