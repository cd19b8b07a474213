"""What needs several processes is refused in one, each setting by its key, with what would do without."""

from __future__ import annotations

import pytest

from nemotron_steps.config.layout.processes import cluster_address, raise_if_ray_needed
from nemotron_steps.config.schema.policy import PolicyConfig
from nemotron_steps.config.schema.rl import ClusterConfig
from nemotron_steps.errors import UnsupportedError

MEGATRON = "policy.megatron_cfg"


def refused(cluster: dict[str, object], megatron: dict[str, int], dtensor: dict[str, object] | None = None) -> None:
    parts = {"megatron_cfg": megatron, **({"dtensor_cfg": dtensor} if dtensor else {})}
    policy = PolicyConfig.model_validate({"checkpoint": "m", **parts})
    raise_if_ray_needed(ClusterConfig.model_validate({"backend": "process", **cluster}), policy)


@pytest.mark.parametrize(
    ("cluster", "megatron", "without"),
    [
        ({"policy_workers": 2}, {}, "cluster.policy_workers=1"),
        ({"num_nodes": 2}, {}, "cluster.num_nodes=1"),
        ({"gpus_per_node": 2}, {}, "cluster.gpus_per_node=1"),
        ({"ray_address": "auto"}, {}, "cluster.ray_address=null"),
        *(({}, {f"{name}_parallel_size": 2}, f"{MEGATRON}.{name}_parallel_size=1")
          for name in ("tensor_model", "pipeline_model", "context", "expert_model")),
    ],
)  # fmt: skip
def test_one_process_refuses_what_needs_more_and_says_how_to_do_without(cluster, megatron, without):
    with pytest.raises(UnsupportedError) as caught:
        refused(cluster, megatron)
    assert caught.value.hints == ("cluster.backend=ray", without)
    assert caught.value.where == without.partition("=")[0]
    refused(dict.fromkeys(cluster, None if "ray_address" in cluster else 1), dict.fromkeys(megatron, 1))
    if cluster:
        refused({**cluster, "backend": "ray"}, megatron)


def test_the_config_names_the_cluster_before_the_environment_does(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "theirs:1")
    assert cluster_address(ClusterConfig(ray_address="ours:1")) == "ours:1"
    assert cluster_address(ClusterConfig()) == "theirs:1"
    monkeypatch.setenv("RAY_ADDRESS", "")
    assert cluster_address(ClusterConfig()) is None
