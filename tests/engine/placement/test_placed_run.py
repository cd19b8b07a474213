"""Whole runs on a real Ray cluster of CPU actors: the figures of one process, and named errors when a worker dies.

Starting actors takes seconds, so each run is first trained and then has its workers killed.
"""

import asyncio
import os
import signal
import threading
import time

import pytest

from benchmarks.grpo_task import make_checkpoint
from nemotron_steps.config.schema.opd import OpdConfig
from nemotron_steps.engine.grpo.async_loop import train_async
from nemotron_steps.engine.grpo.loop import sample_groups, train
from nemotron_steps.engine.placement import environment_actor, generator_group
from nemotron_steps.engine.types import GenerationRequest, SamplingParams
from nemotron_steps.errors import EngineError, WorkerLostError
from tests.engine.grpo.grpo_runs import metrics_of
from tests.engine.placement.conftest import config_of, start
from tests.engine.policy.batches import grouped_batch

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180)]
SECONDS = 20
"""Within which a death is noticed; it takes one or two on an idle machine."""


def figures(config, work, afterwards=lambda run: None):
    """Metrics and final weights of a run; `afterwards` gets it while it is still up."""
    records = []
    run, _ = start(config, work, records)
    try:
        (train_async if config.grpo.async_grpo.enabled else train)(run)
        weights = {name: tensor.clone() for name, tensor in run.policy.weights()}
        afterwards(run)
    finally:
        run.close()
    return metrics_of(records), weights


def assert_same(there, here, names):
    (metrics, weights), (expected_metrics, expected) = there, here
    for name in names:
        assert [m[name] for m in metrics] == pytest.approx([m[name] for m in expected_metrics], rel=1e-4), name
    assert weights.keys() == expected.keys()
    # Steps are of size 2e-3; a gradient near zero may make Adam's first ones differ by a little of that.
    assert all((weights[name] - expected[name]).abs().max() < 1e-4 for name in expected)


def lost(worker, action, sign=signal.SIGKILL):
    """Kill a worker a moment after `action` begins; it must fail with the worker's name, in time."""
    threading.Timer(0.3, os.kill, (worker.pid, sign)).start()
    started = time.monotonic()
    with pytest.raises(WorkerLostError, match=worker.name) as caught:
        while True:
            action()
    assert time.monotonic() - started < SECONDS
    assert caught.value.exit_code == 3
    assert f"process {worker.pid}" in caught.value.where and worker.log in caught.value.where


def sample(run):
    number = time.monotonic_ns()
    return asyncio.run(sample_groups(run, next(iter(run.prompts)), [f"{number}/{i}" for i in range(4)]))


def replaced(run):
    """Kill the environments' actor: a new one answers what the old one was asked, MAX_RESTARTS times."""
    environments = run.collector.environments
    first = environments.worker
    os.kill(first.pid, signal.SIGKILL)
    groups = sample(run)
    assert all(r.failure is None for group in groups for r in group.rollouts)
    assert environments.restarts == 1 and environments.worker.pid != first.pid
    run.judges[-1].start_step("again")  # judges behind HTTP are told where they are now
    environments.restarts = environment_actor.MAX_RESTARTS
    os.kill(environments.worker.pid, signal.SIGKILL)
    with pytest.raises(WorkerLostError, match="rollouts failed in their environments") as caught:
        sample(run)
    assert caught.value.exit_code == 3 and "`environments` is lost" in caught.value.found


def generate(run):
    """Two requests, one for each worker where there are two."""
    for number in range(2):
        request_id = f"{time.monotonic_ns()}/{number}"
        run.generator.submit(GenerationRequest(request_id, [5, 6, 7], SamplingParams(max_new_tokens=4), 2))
    while run.generator.pending():
        run.generator.step()


def test_a_run_with_a_judge_is_the_same_in_one_process_and_on_ray(cluster, checkpoint, tmp_path):
    judge = {"responses_api_models": {"vllm_model": {"model": str(checkpoint), "max_total_sequence_length": 96}}}
    changes = {
        "env": {"should_use_nemo_gym": False, "environment": "judged", "nemo_gym": {"judge_model": judge}},
        "loss_fn__reference_policy_kl_penalty": 1e-2,
    }
    here = figures(config_of(checkpoint, 3, **changes), tmp_path / "process")

    def kill_the_judge(run):
        assert len(run.judges[0].workers) == 2
        lost(run.judges[0].workers[1], lambda: sample(run))

    judge["responses_api_models"]["vllm_model"]["replicas"] = 2
    there = figures(config_of(checkpoint, 3, **changes, cluster__backend="ray"), tmp_path / "ray", kill_the_judge)
    assert_same(there, here, ("loss", "reward/mean", "grad_norm", "kl_penalty"))
    assert all(m["weight_sync/bytes"] > 1e6 and m["weight_sync/seconds"] > 0 for m in there[0])


def test_two_ranks_and_generators_on_another_node_train_as_one_process_does(
    second_node, checkpoint, tmp_path, monkeypatch
):
    here = figures(config_of(checkpoint, 3), tmp_path / "process")

    def break_it(run):
        batch = grouped_batch()
        batch.input_ids[0, 3] = 100_000  # no such token: the rank's own error arrives, not Ray's
        with pytest.raises(EngineError, match="policy rank") as caught:
            run.policy.logprobs(batch)
        assert "IndexError" in caught.value.found
        nodes = {worker.node for worker in run.policy.workers}, {worker.node for worker in run.generator.workers}
        assert len(set.union(*nodes)) == 2 and not nodes[0] & nodes[1]
        assert run.generator.transports == ["gloo", "gloo"]
        monkeypatch.setattr(generator_group, "SILENT_SECONDS", 3.0)
        stopped = run.generator.workers[1]
        lost(stopped, lambda: generate(run), signal.SIGSTOP)
        os.kill(stopped.pid, signal.SIGKILL)

    changes = {
        "cluster__backend": "ray",
        "cluster__ray_address": second_node,  # an existing cluster: every worker takes one of the nodes' two CPUs
        "cluster__policy_workers": 2,
        "policy__generation__colocated": {"enabled": False, "generation_devices": 2},
    }
    there = figures(config_of(checkpoint, 3, **changes), tmp_path / "ray", break_it)
    assert_same(there, here, ("loss", "reward/mean", "grad_norm"))
    # Each generator received the whole model.
    assert there[0][0]["weight_sync/bytes"] == 2 * sum(tensor.nbytes for tensor in here[1].values())


def test_asynchronous_training_on_ray_keeps_the_age_bound_and_its_checkpoints(cluster, checkpoint, tmp_path):
    def load_and_kill(run):
        trained = {name: tensor.clone() for name, tensor in run.policy.weights()}
        saved = run.checkpoints.latest()
        assert saved.step == 8
        run.policy.train_step(grouped_batch())
        run.policy.load_checkpoint(saved.policy_path)
        assert all(tensor.equal(trained[name]) for name, tensor in run.policy.weights())
        replaced(run)
        lost(run.generator.workers[0], lambda: generate(run))
        lost(run.policy.workers[1], lambda: run.policy.train_step(grouped_batch()))

    config = config_of(
        checkpoint,
        8,
        cluster__backend="ray",
        cluster__policy_workers=2,
        grpo__async_grpo={"enabled": True, "max_trajectory_age_steps": 1},
        loss_fn__use_importance_sampling_correction=True,
        loss_fn__truncated_importance_sampling_type="tis",
        loss_fn__truncated_importance_sampling_ratio=5,
        checkpointing={"save_period": 4, "save_async": True},
    )
    metrics, _ = figures(config, tmp_path, load_and_kill)
    assert len(metrics) == 8
    assert max(m["policy_lag/max"] for m in metrics) == 1  # generation did run ahead, and no further
    # Tokens of an older version differ from the policy's, by no more than one step of training makes them.
    assert max(m["token_mult_prob_error"] for m in metrics) < 1.5


def test_teachers_on_two_ranks_or_on_their_own_teach_what_they_do_in_one_process(cluster, checkpoint, tmp_path):
    teacher = tmp_path / "teacher"
    make_checkpoint(teacher, seed=1)

    def config(topk, apart=None, **changes):
        section = {"teachers": {"only": str(teacher)}, "topk_logits_k": topk, "non_colocated_teachers": apart or {}}
        return config_of(checkpoint, 3, schema=OpdConfig, loss_fn={}, on_policy_distillation=section, **changes)

    def kill_the_teacher(run):
        ranks = run.distillation.teachers.workers
        assert [worker.name for worker in ranks] == ["teacher only rank 0", "teacher only rank 1"]
        assert not {worker.pid for worker in ranks} & {worker.pid for worker in run.policy.workers}
        batch = grouped_batch()
        lost(ranks[1], lambda: run.distillation.teachers.score(batch, ["only"] * len(batch)))

    for topk in (16, None):
        here = figures(config(topk), tmp_path / f"process {topk}")
        there = figures(config(topk, cluster__backend="ray", cluster__policy_workers=2), tmp_path / f"ray {topk}")
        assert_same(there, here, ("loss", "grad_norm", "teacher_kl/mean"))
        if topk is not None:
            own = {"enabled": True, "default_teacher_cfg": {"tensor_model_parallel_size": 2, "micro_batch_size": 3}}
            apart = figures(config(topk, own, cluster__backend="ray"), tmp_path / "apart", kill_the_teacher)
            assert_same(apart, here, ("loss", "grad_norm", "teacher_kl/mean"))
