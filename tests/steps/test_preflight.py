"""What the training steps refuse before any step of a run starts."""

from __future__ import annotations

import pytest

from nemotron_steps.config.schema.rl import ClusterConfig, RlConfig
from nemotron_steps.errors import ConfigError, DataError, UnsupportedError
from nemotron_steps.steps.placement import refuse_without_gpus
from nemotron_steps.steps.rl import preflight


def test_prompts_that_an_earlier_step_will_make_replace_those_of_the_config():
    config = RlConfig.model_validate({"data": {"train": {"data_path": "nowhere.jsonl"}}})
    preflight.check(config, {"prompts": None})
    with pytest.raises(DataError, match="no such prompt file"):
        preflight.check(config, {})


def test_a_run_without_prompts_is_refused():
    with pytest.raises(ConfigError, match="no training prompts"):
        preflight.check(RlConfig(), {})


def test_gpus_are_asked_for_where_there_are_any(tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    cluster = ClusterConfig(backend="ray", gpus_per_node=8)
    with pytest.raises(UnsupportedError, match="this machine has none") as caught:
        refuse_without_gpus(cluster, tmp_path)
    assert "cluster.gpus_per_node=0" in caught.value.hints[0]
    for fine in (ClusterConfig(backend="ray"), ClusterConfig(backend="ray", gpus_per_node=8, ray_address="auto")):
        refuse_without_gpus(fine, tmp_path)
    (tmp_path / "nvidia0").touch()
    refuse_without_gpus(cluster, tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(UnsupportedError, match="none"):
        refuse_without_gpus(cluster, tmp_path)
