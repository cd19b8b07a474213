"""What a run asks of its cluster, and what it keeps from it."""

import asyncio
import subprocess
import sys
from itertools import groupby
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemotron_steps.config.schema.rl import RlConfig, VllmModelConfig
from nemotron_steps.engine.placement import cluster as cluster_module
from nemotron_steps.engine.placement import on_ray
from nemotron_steps.engine.placement.cluster import node_by_node
from nemotron_steps.engine.placement.environment_actor import EnvironmentWorker, copy_for
from nemotron_steps.engine.placement.on_ray import DevicePlan
from nemotron_steps.environments.base import Environment, EnvironmentConfig, GradeResult
from nemotron_steps.errors import ConfigError, WorkerLostError


def plan(judges=0, **changes):
    gpus, nodes, judge_nodes = changes.get("gpus", 0), changes.get("nodes", 1), changes.get("judge_nodes", 0)
    config = {
        "cluster": {"gpus_per_node": gpus, "num_nodes": nodes, "policy_workers": changes.get("workers")},
        "policy": {
            "generation": {
                "backend": "vllm",
                "vllm_cfg": {"tensor_parallel_size": changes.get("tensor", 1)},
                "colocated": {"enabled": not changes.get("separate"), "generation_devices": changes.get("separate")},
            }
        },
        "env": {"nemo_gym": {"num_gpu_nodes": judge_nodes}},
    }
    roles = ("genrm_model", "judge_model", "safety_model")[:judges]
    chosen = {role: VllmModelConfig.model_validate(changes.get("judge", {})) for role in roles}
    return DevicePlan.of(RlConfig.model_validate(config), chosen)


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
    assert (judged.policy, judged.judges, len(judged.bundles)) == (12, {"genrm_model": 4, "judge_model": 4}, 24)


def test_a_tensor_parallel_generator_has_a_bundle_of_several_devices():
    together = plan(gpus=8, tensor=4)
    assert (together.policy, together.generators, together.bundles) == (8, 2, [{"GPU": 4.0}] * 2)
    assert [together.policy_bundle(rank) for rank in range(8)] == [0] * 4 + [1] * 4
    apart = plan(1, gpus=8, nodes=3, separate=8, tensor=4, judge_nodes=1, judge={"replicas": 1})
    assert (apart.policy, apart.generators, apart.generator_bundle(1)) == (8, 2, 9)
    assert apart.bundles == [{"GPU": 1.0}] * 8 + [{"GPU": 4.0}] * 2 + [{"GPU": 1.0}]
    cpu = plan(workers=2, separate=4, tensor=2)
    assert (cpu.policy, cpu.generators, cpu.bundles) == (2, 2, [{}] * 4)
    assert plan(workers=2, tensor=2).generators == 1


def asked_of_ray(found):
    """(bundle, GPUs, GPUs by name) of each rank and of each generator."""
    cluster = SimpleNamespace(options=lambda bundle, gpus=0.0, named=(): (bundle, gpus, tuple(named)))
    ranks = [SimpleNamespace(gpus=(str(rank),)) for rank in range(found.policy)]
    return on_ray.policy_options(found, cluster), on_ray.generator_options(found, cluster, ranks)


def test_what_shares_a_gpu_asks_for_no_more_than_all_of_it_and_what_has_it_alone_for_all():
    ranks, generators = asked_of_ray(plan(gpus=2))
    assert ranks == generators == [(0, 0.4, ()), (1, 0.4, ())]
    ranks, generators = asked_of_ray(plan(gpus=4, tensor=2))
    assert ranks == [(0, 0.6, ()), (0, 0.6, ()), (1, 0.6, ()), (1, 0.6, ())]
    assert generators == [(0, 0.0, ("0", "1")), (1, 0.0, ("2", "3"))]
    ranks, generators = asked_of_ray(plan(gpus=4, separate=2))
    assert ranks == [(0, 1.0, ()), (1, 1.0, ())] and generators == [(2, 1.0, ()), (3, 1.0, ())]
    _, beside_judges = asked_of_ray(plan(1, gpus=4, separate=2))
    assert all(0 < gpus < 1 for _, gpus, _ in beside_judges)
    for judges in (0, 1):
        assert asked_of_ray(plan(judges, gpus=4, separate=2, tensor=2))[1] == [(2, 2.0, ())]


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"gpus": 2, "workers": 4}, "cluster.policy_workers"),
        ({"gpus": 8, "separate": 6, "tensor": 4}, "generation_devices"),
        ({"judges": 3, "gpus": 2, "nodes": 2, "judge_nodes": 1}, "num_gpu_nodes"),
        ({"judges": 1, "gpus": 8, "judge": {"backend": "vllm", "tensor_parallel_size": 2}}, "tensor_parallel_size"),
    ],
)
def test_a_plan_that_does_not_add_up_is_refused(changes, key):
    with pytest.raises(ConfigError) as caught:
        plan(**changes)
    assert key in caught.value.where


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


@given(st.lists(st.tuples(st.sampled_from([1.0, 4.0]), st.sampled_from("abcd")), max_size=40))
def test_neighbours_that_ask_for_the_same_fill_a_node_before_the_next_begins(placed):
    bundles, nodes = [{"GPU": gpus} for gpus, _ in placed], [node for _, node in placed]
    order = node_by_node(bundles, nodes)
    assert sorted(order) == list(range(len(placed)))
    assert [bundles[index] for index in order] == bundles
    for gpus in (1.0, 4.0):
        visited = [nodes[index] for index in order if bundles[index] == {"GPU": gpus}]
        runs = [len(list(run)) for _, run in groupby(visited)]
        assert len(runs) == len(set(visited)) and runs == sorted(runs, reverse=True)


@pytest.mark.ray
def test_ray_takes_no_request_to_stop_from_the_run():
    program = """
import os, signal, sys
from nemotron_steps import stopping
from nemotron_steps.config.schema.rl import ClusterConfig
from nemotron_steps.engine.placement.cluster import RayCluster

with stopping.interruptible() as asked:
    cluster = RayCluster(ClusterConfig(backend="ray"))
    try:
        os.kill(os.getpid(), signal.SIGTERM)
    except KeyboardInterrupt:
        cluster.close()
        print(asked["signal"])
        sys.exit(7)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=180)
    assert (done.returncode, done.stdout) == (7, "SIGTERM\n"), done.stderr


def test_a_copy_of_a_judge_is_chosen_by_the_question_alone() -> None:
    questions = [[{"role": "user", "content": str(n)}] for n in range(200)]
    chosen = [copy_for(question, 4) for question in questions]
    assert chosen == [copy_for([dict(reversed(q[0].items()))], 4) for q in questions]
    assert {copy_for(question, 1) for question in questions} == {0}
    assert [30 < chosen.count(copy) < 70 for copy in range(4)] == [True] * 4
    assert [copy_for(question, 4) for question in questions[:8]] == CHOSEN


class Made(Environment):
    """The least that an environment is."""

    name = "made"

    async def verify(self, row, response, session) -> GradeResult:
        return GradeResult(1.0)


def test_a_session_of_an_actor_that_died_is_lost_to_the_next_and_another_is_not() -> None:
    async def body() -> None:
        row = {"responses_create_params": {"input": "hello"}}
        died, another = EnvironmentWorker({}), EnvironmentWorker({})
        for worker in (died, another):
            await worker.add("made", Made, EnvironmentConfig())
        lost, held = await died.seed("made", row), await another.seed("made", row)
        with pytest.raises(WorkerLostError, match="a session is lost"):
            await another.ask("made", "follow_up", row, None, lost)
        assert await another.ask("made", "follow_up", row, None, held) is None
        for session in (lost, held):
            await another.release("made", session.state)

    asyncio.run(body())


CHOSEN = [2, 3, 2, 2, 2, 3, 3, 0]
"""A resumed run asks the copies that the first one asked, also after an update of this package."""
