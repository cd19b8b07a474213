"""What vLLM cannot do with models that no policy trains, under the keys of who samples from them."""

from __future__ import annotations

from typing import Any

import pytest

from nemotron_steps.config.layout.model_spec import ModelSpec
from nemotron_steps.config.layout.other_models import raise_if_vllm_violates, vllm_keys, vllm_violations
from nemotron_steps.errors import ConfigError

DENSE = ModelSpec("qwen3", layers=4, attention_heads=16, key_value_heads=8, head_dim=16, mlp_width=96)
NARROW = ModelSpec("qwen3", layers=4, attention_heads=12, key_value_heads=4, head_dim=16, mlp_width=96)
HYBRID = ModelSpec(
    "nemotron_h", layers=4, attention_heads=16, key_value_heads=8, head_dim=16, experts=8, mlp_width=96,
    mamba_heads=16, mamba_groups=2,
)  # fmt: skip
BACKEND, CFG = "generation.backend", "generation.vllm_cfg"
JUDGE = "env.nemo_gym.judge_model.responses_api_models.vllm_model"


def found(models: dict[str, ModelSpec], **cfg: Any) -> list[tuple[tuple[str, ...], str, tuple[str, ...]]]:
    asked = {BACKEND: "vllm", **{f"{CFG}.{key}": value for key, value in cfg.items()}}
    return [(each.models, each.violations[0].key, each.hints) for each in vllm_violations(models, asked.get)]


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
    told = found(models, tensor_parallel_size=width)
    if hint is None:
        assert told == []
        return
    ((_, key, hints),) = told
    assert (key, hints) == (f"{CFG}.tensor_parallel_size", (f"{CFG}.tensor_parallel_size={hint}",))
    assert found(models, tensor_parallel_size=hint) == []


def test_only_those_that_do_not_fit_are_named() -> None:
    ((models, *_),) = found({"models.a": DENSE, "models.b": NARROW}, tensor_parallel_size=8)
    assert models == ("models.b",)


def test_experts_go_along_with_the_width() -> None:
    ((_, _, hints),) = found({"model": HYBRID}, tensor_parallel_size=4, expert_parallel_size=4)
    assert hints == (f"{CFG}.tensor_parallel_size=2 {CFG}.expert_parallel_size=2",)


def test_a_model_that_vllm_samples_otherwise_needs_another_generator() -> None:
    bounded = ModelSpec("nemotron_h", bounds_time_steps=True)
    assert found({"model": bounded}) == [(("model",), BACKEND, (f"{BACKEND}=embedded",))]
    ((_, _, hints),) = found({"model": bounded}, tensor_parallel_size=2)
    assert hints == (f"{BACKEND}=embedded {CFG}.tensor_parallel_size=1",)


def test_a_judge_has_its_own_width_and_generator() -> None:
    asked = {f"{JUDGE}.backend": "vllm", f"{JUDGE}.tensor_parallel_size": 8}
    (each,) = vllm_violations({f"{JUDGE}.model": NARROW, "model": NARROW}, asked.get)
    assert each.models == (f"{JUDGE}.model",) and each.hints == (f"{JUDGE}.tensor_parallel_size=4",)
    with pytest.raises(ConfigError, match="tensor_parallel_size=8 does not divide") as refused:
        raise_if_vllm_violates({f"{JUDGE}.model": NARROW}, asked.get)
    assert (refused.value.where, refused.value.hints) == (f"{JUDGE}.tensor_parallel_size", each.hints)


def test_what_vllm_does_not_generate_or_a_policy_trains_is_none_of_this() -> None:
    asked = {BACKEND: "embedded", f"{CFG}.tensor_parallel_size": 7}
    assert list(vllm_violations({"model": DENSE}, asked.get)) == []
    raise_if_vllm_violates({"model": DENSE}, asked.get)
    assert vllm_keys("policy.checkpoint", {BACKEND: "vllm"}.get) is None
