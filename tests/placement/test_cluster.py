"""What a run asks of its cluster, and what it is told when that is not there."""

from __future__ import annotations

import sys

import pytest

from nemotron_steps.config.schema.rl import ClusterConfig, RlConfig
from nemotron_steps.engine.placement import cluster as cluster_module
from nemotron_steps.engine.placement.cluster import RayCluster
from nemotron_steps.engine.placement.on_ray import DevicePlan
from nemotron_steps.errors import ConfigError, UnsupportedError


def plan(judges=0, **changes):
    gpus, nodes, judge_nodes = changes.get("gpus", 0), changes.get("nodes", 1), changes.get("judge_nodes", 0)
    config = {
        "cluster": {"gpus_per_node": gpus, "num_nodes": nodes, "policy_workers": changes.get("workers")},
        "policy": {
            "generation": {
                "colocated": {"enabled": not changes.get("separate"), "generation_devices": changes.get("separate")}
            }
        },
        "env": {"nemo_gym": {"num_gpu_nodes": judge_nodes}},
    }
    return DevicePlan.of(RlConfig.model_validate(config), judges)


def test_devices_are_shared_or_kept_apart_as_the_config_says():
    cpu = plan(workers=2, separate=3)
    assert (cpu.policy, cpu.generators, cpu.bundles) == (2, 3, [{}] * 5)
    together = plan(gpus=4)
    assert (together.policy, together.generators, len(together.bundles)) == (4, 4, 4)
    assert [together.generator_bundle(number) for number in range(4)] == [0, 1, 2, 3]
    apart = plan(gpus=8, nodes=2, separate=4)
    assert (apart.policy, apart.generators, apart.bundles) == (12, 4, [{"GPU": 1.0}] * 16)
    assert apart.generator_bundle(0) == 12
    judged = plan(2, gpus=8, nodes=3, separate=4, judge_nodes=1)
    assert (judged.policy, judged.judges, len(judged.bundles)) == (12, 2, 18)


@pytest.mark.parametrize(
    ("changes", "key"),
    [({"gpus": 2, "separate": 2}, "generation_devices"), ({"gpus": 2, "workers": 4}, "cluster.policy_workers")],
)
def test_a_plan_that_does_not_add_up_is_refused(changes, key):
    with pytest.raises(ConfigError) as caught:
        plan(**changes)
    assert key in caught.value.where


def test_without_ray_the_package_to_install_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UnsupportedError) as caught:
        RayCluster(ClusterConfig(backend="ray"))
    assert "pip install 'nemotron-steps[ray]'" in caught.value.hints


@pytest.mark.ray
@pytest.mark.parametrize(
    ("settings", "key"),
    [({"num_nodes": 2}, "cluster.ray_address"), ({"gpus_per_node": 100}, "cluster.gpus_per_node")],
)
def test_what_this_machine_cannot_be_is_refused_before_ray_starts(monkeypatch, settings, key):
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    with pytest.raises(UnsupportedError) as caught:
        RayCluster(ClusterConfig(backend="ray", **settings))
    assert caught.value.where == key


@pytest.mark.ray
def test_devices_that_the_cluster_lacks_are_refused_and_not_waited_for(cluster, monkeypatch):
    monkeypatch.setattr(cluster_module, "RESERVE_SECONDS", 1.0)
    with pytest.raises(UnsupportedError, match="does not have the devices"):
        RayCluster(ClusterConfig(backend="ray")).reserve([{"GPU": 1.0}])


def test_secrets_are_not_handed_to_ray_which_logs_what_it_is_given():
    given = {
        "NCCL_DEBUG": "INFO",
        "HF_HOME": "/hf",
        "HF_TOKEN": "hf_secret",
        "VLLM_API_KEY": "secret",
        "TOKENIZERS_PARALLELISM": "false",
        "WANDB_API_KEY": "secret",
    }
    passed = cluster_module._passed_on(given)
    assert passed == {"NCCL_DEBUG": "INFO", "HF_HOME": "/hf", "TOKENIZERS_PARALLELISM": "false"}
