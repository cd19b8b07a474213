"""Teachers on devices of their own: what they score, and which devices they get."""

import dataclasses
from contextlib import ExitStack

import pytest
import torch

from nemotron_steps.config.layout.parallel_config import ParallelConfig, TeacherLayout
from nemotron_steps.config.schema.opd import NonColocatedTeachersConfig, OpdConfig
from nemotron_steps.engine.losses.distillation import DistillationLoss, TeacherKl
from nemotron_steps.engine.placement.cluster import RayCluster
from nemotron_steps.engine.placement.on_ray import DevicePlan
from nemotron_steps.engine.placement.policy_group import PlacedTeachers, teacher_config
from nemotron_steps.engine.policy.megatron import MegatronPolicy
from nemotron_steps.engine.policy.teachers import FrozenTeachers
from nemotron_steps.errors import ConfigError
from tests.engine.policy.batches import grouped_batch, policy_config
from tests.engine.policy.distilling_ranks import VOCAB, K, names_of, write_models
from tests.models.checkpoints import write_checkpoint


@pytest.mark.ray
@pytest.mark.timeout(180)
def test_teachers_of_different_layouts_score_and_teach_as_beside_the_policy(cluster, tmp_path):
    folders = write_models(tmp_path)
    named, batch = {name: folders[name] for name in ("a", "b")}, grouped_batch()
    policy = MegatronPolicy(policy_config(), folders["policy"], DistillationLoss(TeacherKl("mixed", 0.3, True)))
    here = FrozenTeachers(policy, named, K, offload=True).score(batch, names_of(batch))
    apart = NonColocatedTeachersConfig.model_validate(
        {
            "enabled": True,
            "default_teacher_cfg": {"micro_batch_size": 2},
            "teacher_overrides": {"a": {"tensor_model_parallel_size": 2, "sequence_parallel": True}},
        }
    )
    assert apart.of("a").micro_batch_size == 2  # what an override leaves out is the default's
    with ExitStack() as resources:
        ray = RayCluster(OpdConfig().cluster, workers=3)
        resources.callback(ray.close)
        ray.reserve([{}] * 3)
        options = {"a": [ray.options(0), ray.options(1)], "b": [ray.options(2)]}
        teachers = PlacedTeachers(options, K, VOCAB, local=True)
        resources.callback(teachers.close)
        configs = {name: teacher_config(policy_config(), apart.of(name)) for name in named}
        teachers.build(configs, named)
        there = teachers.score(batch, names_of(batch))
        write_checkpoint("qwen3", tmp_path / "other", vocab_size=VOCAB + 1)
        with pytest.raises(ConfigError, match="another vocabulary"):
            teachers.build(configs, {**named, "b": tmp_path / "other"})
    for name in ("teacher_logprobs", "teacher_topk_logprobs"):
        torch.testing.assert_close(getattr(there, name), getattr(here, name), atol=1e-5, rtol=1e-5)
    assert (there.teacher_topk_indices == here.teacher_topk_indices).float().mean() > 0.99
    before = {name: tensor.clone() for name, tensor in policy.weights()}
    expected = policy.train_step(here)
    again = MegatronPolicy(policy.config, folders["policy"], policy.loss_fn)
    assert all(tensor.equal(before[name]) for name, tensor in again.weights())
    found = again.train_step(there)
    assert {name: found[name] for name in ("loss", "grad_norm")} == pytest.approx(
        {name: expected[name] for name in ("loss", "grad_norm")}, rel=1e-5
    )


@pytest.mark.parametrize("colocated", [True, False])
def test_each_teacher_has_gpus_of_its_own_before_the_judges(colocated):
    teachers = (TeacherLayout("a", tensor=2, gpus_per_node=2), TeacherLayout("b", gpus_per_node=1))
    sizes = ParallelConfig(backend="ray", gpus_per_node=8, samples=True, colocated=colocated, teachers=teachers)
    assert sizes.gpus == 5 and sizes.ranks == (5 if colocated else 4)
    plan = DevicePlan(
        sizes.ranks, 5 if colocated else 1, colocated, {"judge": 1}, (1,), gpus=True, teachers={"a": 2, "b": 1}
    )
    taken = [plan.policy_bundle(rank) for rank in range(plan.policy)]
    taken += [] if colocated else [plan.generator_bundle(0)]
    taken += [*plan.teacher_bundles("a"), *plan.teacher_bundles("b"), len(plan.bundles) - 1]
    assert taken == list(range(9)) == list(range(len(plan.bundles)))
    on_cpu = dataclasses.replace(plan, gpus=False, judge_devices=())
    assert [*on_cpu.teacher_bundles("b")] == [len(on_cpu.bundles) - 1]
