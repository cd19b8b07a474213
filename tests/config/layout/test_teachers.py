"""Layouts of teachers on devices of their own: what does not come out even, under which key, and what mends it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from nemotron_steps.config.layout.constraints import raise_if_violated, violations
from nemotron_steps.config.layout.model_spec import ModelSpec
from nemotron_steps.config.layout.other_models import raise_if_teachers_violate, teacher_violations
from nemotron_steps.config.layout.parallel_config import ParallelConfig, TeacherLayout
from nemotron_steps.errors import ConfigError

APART = "on_policy_distillation.non_colocated_teachers"
TEACHERS = "on_policy_distillation.teachers"
OVERRIDES = f"{APART}.teacher_overrides"
BASE: dict[str, Any] = {
    f"{APART}.enabled": True,
    TEACHERS: {"a": "x", "b": "y"},
    "cluster.backend": "ray",
    "cluster.gpus_per_node": 8,
    "cluster.num_nodes": 3,
}


def parallel_config_of(changes: dict[str, Any]) -> ParallelConfig:
    return ParallelConfig.read({**BASE, **changes}.get)


def test_teachers_take_their_gpus_off_the_policys() -> None:
    assert parallel_config_of({}).ranks == 8  # of 24, whole nodes each
    assert parallel_config_of({f"{APART}.enabled": False}).ranks == 24
    own = {f"{OVERRIDES}.b": {"gpus_per_node": 2}, f"{OVERRIDES}.b.gpus_per_node": 2}
    assert parallel_config_of(own).ranks == 14
    on_cpu = parallel_config_of(
        {"cluster.gpus_per_node": 0, f"{APART}.default_teacher_cfg.tensor_model_parallel_size": 2}
    )
    assert [teacher.ranks(0) for teacher in on_cpu.teachers] == [2, 2] and on_cpu.ranks == 1


@pytest.mark.parametrize(
    ("changes", "said", "mended"),
    [
        ({"cluster.num_nodes": 2}, "teachers take 16 GPUs of 16", "cluster.num_nodes=3"),
        (
            {f"{APART}.default_teacher_cfg.tensor_model_parallel_size": 3},
            "the layout of teachers a and b does not divide their GPUs",
            f"{APART}.default_teacher_cfg.tensor_model_parallel_size=4",
        ),
        (
            {f"{APART}.default_teacher_cfg.expert_model_parallel_size": 16},
            "expert parallelism of teachers a and b does not divide their GPUs",
            f"{APART}.default_teacher_cfg.expert_model_parallel_size=8",
        ),
        (  # of a pipeline stage's four
            {
                f"{APART}.default_teacher_cfg.pipeline_model_parallel_size": 2,
                f"{APART}.default_teacher_cfg.expert_model_parallel_size": 8,
            },
            "expert parallelism of teachers a and b does not divide their GPUs",
            f"{APART}.default_teacher_cfg.expert_model_parallel_size=4",
        ),
        (
            {f"{OVERRIDES}.b": {"gpus_per_node": 9}, f"{OVERRIDES}.b.gpus_per_node": 9},
            "teacher b asks for more GPUs of a node than it has",
            f"{OVERRIDES}.b.gpus_per_node=8",
        ),
    ],
)
def test_a_teachers_layout_that_does_not_come_out_even_is_refused_with_what_mends_it(
    changes: dict[str, Any], said: str, mended: str
) -> None:
    sizes = parallel_config_of(changes)
    with pytest.raises(ConfigError, match=said) as caught:
        raise_if_violated(sizes)
    assert caught.value.hints == (mended,)
    key, _, value = mended.partition("=")
    assert not violations(parallel_config_of({**changes, key: int(value)}))


def test_a_teacher_whose_model_its_layout_does_not_fit_is_named_under_its_own_keys() -> None:
    model = ModelSpec("qwen3", layers=4, attention_heads=6, key_value_heads=2)
    shared = parallel_config_of({f"{APART}.enabled": False, "policy.megatron_cfg.tensor_model_parallel_size": 4})
    key = f"{APART}.default_teacher_cfg.tensor_model_parallel_size"
    for sizes, expected in (
        (shared, "policy.megatron_cfg.tensor_model_parallel_size"),
        (parallel_config_of({key: 4}), key),
    ):
        (found,) = teacher_violations(sizes, {"a": model})
        assert found.names == ("a",) and found.violations[0].key == expected
        with pytest.raises(ConfigError, match="teacher a") as caught:
            raise_if_teachers_violate(sizes, {"a": model})
        assert caught.value.hints == (f"{expected}=2",)
    assert not [*teacher_violations(parallel_config_of({key: 2}), {"a": model})]


@pytest.mark.parametrize(("changes", "wrong"), [
    ({}, []), ({"tensor": 3}, ["tensor_model_parallel_size"]), ({"context": 3}, ["context_parallel_size"]),
    ({"pipeline": 3}, ["pipeline_model_parallel_size"]), ({"expert": 3}, ["expert_model_parallel_size"]),
    ({"tensor": 2, "sequence_parallel": False}, ["sequence_parallel"]), ({"tensor": 2}, []),
])  # fmt: skip
def test_a_model_is_held_against_the_whole_layout_of_its_own_teacher(changes: dict[str, Any], wrong: list[str]) -> None:
    model = ModelSpec("nemotron_h", layers=2, attention_heads=8, experts=8, mamba_heads=8, mamba_groups=8)
    teacher = TeacherLayout("a", **{"sequence_parallel": True, **changes})
    sizes = replace(ParallelConfig(), teachers=(teacher,))
    found = [each.key for violation in teacher_violations(sizes, {"a": model}) for each in violation.violations]
    assert {key.rpartition(".")[2] for key in found} == set(wrong)
    assert all(key.startswith(f"{APART}.default_teacher_cfg.") for key in found)
    assert [*teacher_violations(sizes, {"b": model})] == []


@pytest.mark.parametrize(("enabled", "given", "names"), [
    (True, {"a": "x"}, ["a"]), (True, "text", []), (True, None, []), (False, {"a": "x"}, []), ("yes", {"a": "x"}, []),
])  # fmt: skip
def test_teachers_have_devices_of_their_own_where_that_is_enabled(enabled: Any, given: Any, names: list[str]) -> None:
    assert [each.name for each in parallel_config_of({f"{APART}.enabled": enabled, TEACHERS: given}).teachers] == names


def test_what_is_said_of_a_teacher_goes_before_the_default_and_null_takes_that_back() -> None:
    default = {
        f"{APART}.default_teacher_cfg.{key}": value
        for key, value in {
            "tensor_model_parallel_size": 2,
            "gpus_per_node": 4,
            "precision": "float32",
            "sequence_parallel": True,
        }.items()
    }
    own = {"gpus_per_node": None, "precision": None, "context_parallel_size": 2, "pipeline_model_parallel_size": "x"}
    values = {**default, f"{OVERRIDES}.b": own, **{f"{OVERRIDES}.b.{key}": value for key, value in own.items()}}
    a, b = parallel_config_of(values).teachers
    section = f"{APART}.default_teacher_cfg"
    assert a == TeacherLayout(
        "a", tensor=2, gpus_per_node=4, precision="float32", sequence_parallel=True, section=section
    )
    assert b == TeacherLayout("b", tensor=2, context=2, sequence_parallel=True, section=f"{OVERRIDES}.b")


@pytest.mark.parametrize(("teacher", "cluster", "ranks"), [
    (TeacherLayout("a", nodes=2), 8, 16), (TeacherLayout("a", nodes=2, gpus_per_node=3), 8, 6),
    (TeacherLayout("a", tensor=2, pipeline=3), 0, 6), (TeacherLayout("a", tensor=2, pipeline=3, expert=4), 0, 12),
])  # fmt: skip
def test_a_teacher_has_the_gpus_of_its_nodes_or_the_processes_of_a_copy(
    teacher: TeacherLayout, cluster: int, ranks: int
) -> None:
    assert teacher.ranks(cluster) == ranks
