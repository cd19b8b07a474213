"""Models that a step does not train: layouts of teachers on devices of their own, and what vLLM generates from."""

from typing import Any

import pytest

from nemotron_steps.config.layout.constraints import hints_of, raise_if_violated, violations
from nemotron_steps.config.layout.model_limits import teacher_violations, vllm_violations
from nemotron_steps.config.layout.model_spec import ModelSpec
from nemotron_steps.config.layout.parallel_config import ParallelConfig
from nemotron_steps.errors import ConfigError

APART = "on_policy_distillation.non_colocated_teachers"
TEACHERS = "on_policy_distillation.teachers"
OVERRIDES, DEFAULT = f"{APART}.teacher_overrides", f"{APART}.default_teacher_cfg"
BASE: dict[str, Any] = {
    f"{APART}.enabled": True,
    TEACHERS: {"a": "x", "b": "y"},
    "cluster.backend": "ray",
    "cluster.gpus_per_node": 8,
    "cluster.num_nodes": 3,
}


def parallel_config_of(changes: dict[str, Any]) -> ParallelConfig:
    return ParallelConfig.read({**BASE, **changes}.get)


@pytest.mark.parametrize(
    ("changes", "said", "fix"),
    [
        ({"cluster.num_nodes": 2}, "teachers take 16 GPUs of 16", "cluster.num_nodes=3"),
        ({f"{DEFAULT}.tensor_model_parallel_size": 6},
         "=6 of teachers a and b does not divide the 8 GPUs of a node", f"{DEFAULT}.tensor_model_parallel_size=2"),
        ({f"{DEFAULT}.pipeline_model_parallel_size": 2, f"{DEFAULT}.expert_model_parallel_size": 8},
         "=8 of teachers a and b does not divide the 4 GPUs of a pipeline stage",
         f"{DEFAULT}.expert_model_parallel_size=4"),
        ({f"{OVERRIDES}.b": {"gpus_per_node": 9}, f"{OVERRIDES}.b.gpus_per_node": 9},
         "gpus_per_node=9 of teacher b is more than a node has", f"{OVERRIDES}.b.gpus_per_node=8"),
    ],
)  # fmt: skip
def test_a_teachers_layout_that_does_not_divide_is_refused_and_the_hint_helps(
    changes: dict[str, Any], said: str, fix: str
) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        raise_if_violated(violations(parallel_config_of(changes)))
    assert caught.value.hints == (fix,)
    key, _, value = fix.partition("=")
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
        assert found.models == ("a",) and found.violations[0].key == expected
        assert found.teachers == "teacher a" and hints_of(found.violations) == (f"{expected}=2",)
    assert not [*teacher_violations(parallel_config_of({key: 2}), {"a": model})]


def test_a_teacher_on_cpu_has_as_many_processes_as_hold_one_copy() -> None:
    on_cpu = parallel_config_of({"cluster.gpus_per_node": 0, f"{DEFAULT}.tensor_model_parallel_size": 2})
    assert [teacher.ranks(0) for teacher in on_cpu.teachers] == [2, 2]


DENSE = ModelSpec("qwen3", layers=4, attention_heads=16, key_value_heads=8, head_dim=16, mlp_width=96)
NARROW = ModelSpec("qwen3", layers=4, attention_heads=12, key_value_heads=4, head_dim=16, mlp_width=96)
HYBRID = ModelSpec(
    "nemotron_h", layers=4, attention_heads=16, key_value_heads=8, head_dim=16, experts=8, mlp_width=96,
    mamba_heads=16, mamba_groups=2,
)  # fmt: skip
BACKEND, CFG = "generation.backend", "generation.vllm_cfg"
JUDGE = "env.nemo_gym.judge_model.responses_api_models.vllm_model"


def vllm_found(models: dict[str, ModelSpec], **cfg: Any) -> list[tuple[tuple[str, ...], str, tuple[str, ...]]]:
    asked = {BACKEND: "vllm", **{f"{CFG}.{key}": value for key, value in cfg.items()}}
    found = vllm_violations(models, asked.get)
    return [(each.models, each.violations[0].key, hints_of(each.violations)) for each in found]


@pytest.mark.parametrize(
    ("models", "width", "hint"),
    [
        ({"model": DENSE}, 8, None),
        ({"model": DENSE}, 12, 4),  # of 12 the divisors, of 16 heads and 8 that share keys
        ({"model": NARROW}, 8, 4),
        ({"models.a": DENSE, "models.b": NARROW}, 8, 4),
        ({"model": HYBRID}, 4, 2),
        ({"model": DENSE}, 7, 1),
    ],
)
def test_a_width_is_cut_to_the_next_that_fits_every_model(
    models: dict[str, ModelSpec], width: int, hint: int | None
) -> None:
    told = vllm_found(models, tensor_parallel_size=width)
    if hint is None:
        assert told == []
        return
    ((_, key, hints),) = told
    assert (key, hints) == (f"{CFG}.tensor_parallel_size", (f"{CFG}.tensor_parallel_size={hint}",))
    assert vllm_found(models, tensor_parallel_size=hint) == []


def test_a_model_that_vllm_samples_otherwise_needs_another_generator() -> None:
    bounded = ModelSpec("nemotron_h", bounds_time_steps=True)
    assert vllm_found({"model": bounded}) == [(("model",), BACKEND, (f"{BACKEND}=embedded",))]
    ((_, _, hints),) = vllm_found({"model": bounded}, tensor_parallel_size=2)
    assert hints == (f"{BACKEND}=embedded {CFG}.tensor_parallel_size=1",)


def test_a_judge_has_its_own_width_and_generator() -> None:
    asked = {f"{JUDGE}.backend": "vllm", f"{JUDGE}.tensor_parallel_size": 8}
    (each,) = vllm_violations({f"{JUDGE}.model": NARROW, "model": NARROW}, asked.get)
    assert each.models == (f"{JUDGE}.model",) and hints_of(each.violations) == (f"{JUDGE}.tensor_parallel_size=4",)
    assert each.violations[0].key == f"{JUDGE}.tensor_parallel_size"
