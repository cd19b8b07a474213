"""Who gets which GPU where a generator has several: real Ray scheduling, on a node that only says it has GPUs."""

import os

import pytest

from nemotron_steps.config.schema.rl import ClusterConfig, RlConfig, VllmModelConfig
from nemotron_steps.engine.placement import on_ray
from nemotron_steps.engine.placement.cluster import RayCluster
from nemotron_steps.engine.placement.on_ray import DevicePlan
from nemotron_steps.engine.workers.workers import result_of, start_workers, stop_workers
from tests.engine.placement.visible_gpus import VisibleGpus

pytestmark = pytest.mark.ray


def config_of(colocated, gpus, devices=None):
    return RlConfig.model_validate(
        {
            "cluster": {"backend": "ray", "gpus_per_node": gpus},
            "policy": {
                "generation": {
                    "backend": "vllm",
                    "vllm_cfg": {"tensor_parallel_size": 2},
                    "colocated": {"enabled": colocated, "generation_devices": devices},
                }
            },
        }
    )


@pytest.fixture
def place():
    started = []

    def placed(name, options):
        started.extend(start_workers(VisibleGpus, [f"{name} {i}" for i in range(len(options))], options, device=False))
        return started[-len(options) :]

    yield placed
    stop_workers(started)


def seen(workers):
    return [result_of(worker.call("visible"), worker) for worker in workers]


@pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="this host claims GPUs that it must not find")
@pytest.mark.parametrize("second_node", [4], indirect=True)
def test_a_wide_generator_has_the_gpus_of_its_ranks_or_its_own(second_node, place):
    for colocated in (True, False):
        plan = DevicePlan.of(
            config_of(colocated, 4, None if colocated else 2), judges={"judge_model": VllmModelConfig()}
        )
        cluster = RayCluster(ClusterConfig(backend="ray"))
        cluster.reserve(plan.bundles)
        policy = place("rank", on_ray.policy_options(plan, cluster))
        generators = place("generator", on_ray.generator_options(plan, cluster, policy))
        judges = place("judge", on_ray.judge_options(plan, cluster, generators))
        ranks = [gpu for gpus in seen(policy) for gpu in gpus]
        assert len(set(ranks)) == len(policy)  # one each
        if colocated:
            assert seen(generators) == [ranks[:2], ranks[2:]]
        else:
            (own,) = seen(generators)
            assert sorted(ranks + own) == ["0", "1", "2", "3"]
        (judge,) = seen(judges)
        assert len(judge) == 1 and judge[0] in seen(generators)[0]
        stop_workers([*policy, *generators, *judges])
        cluster.release()
