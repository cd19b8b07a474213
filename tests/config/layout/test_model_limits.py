"""What a model was not made for: longer sequences, chats, tokens that it lacks."""

from typing import Any

import pytest

from nemotron_steps.config.layout.model_limits import POLICY, lengths_of, limit_violations
from nemotron_steps.config.layout.model_spec import ModelSpec

FIT = ModelSpec("qwen3", positions=512, vocabulary=300, tokens=300, has_chat_template=True, has_end_token=True)
ASKED = {"evaluation.max_total_sequence_length": 512, "difficulty.max_total_sequence_length": 512}


def found(model_key: str, asked: dict[str, Any], **facts: Any) -> list[tuple[str, str, str, tuple[str, ...]]]:
    model = ModelSpec(**{**vars(FIT), **facts})
    return [
        (each.where, each.expected, each.found, each.hints)
        for each in limit_violations(model_key, "model", model, asked.get)
    ]


@pytest.mark.parametrize(
    ("asked", "key", "said"),
    [
        ({"evaluation.max_total_sequence_length": 513}, 0, "evaluation.max_total_sequence_length=513"),
        ({"difficulty.max_total_sequence_length": 513}, 1, "difficulty.max_total_sequence_length=513"),
    ],
)
def test_a_length_above_the_models_positions_is_told_with_the_longest_there_is(
    asked: dict[str, int], key: int, said: str
) -> None:
    name = lengths_of("model")[key]
    assert found("model", {**ASKED, **asked}) == [(name, "at most 512", said, (f"{name}=512",))]
    assert found(POLICY, {**ASKED, **asked}) == []  # whose lengths its layout goes along with


@pytest.mark.parametrize(
    "facts", [{}, {"has_chat_template": False}, {"has_end_token": False}, {"tokens": 301}], ids=str
)
def test_what_a_model_lacks_is_told_at_the_models_key(facts: dict[str, Any]) -> None:
    assert [each[0] for each in found("model", ASKED, **facts)] == ["model"] * len(facts)
    assert found("model", {}, tokens=None, has_chat_template=None, has_end_token=None, positions=None) == []


def test_a_quantised_judge_is_served_by_vllm_alone() -> None:
    judge = "env.nemo_gym.genrm_model.responses_api_models.vllm_model"
    assert found(f"{judge}.model", {f"{judge}.backend": "vllm"}, quantised="fp8") == []
    assert len(found(f"{judge}.model", {f"{judge}.backend": "embedded"}, quantised="fp8")) == 1
    assert len(found(POLICY, {f"{judge}.backend": "vllm", "policy.backend": "vllm"}, quantised="fp8")) == 1


_DTENSOR = {"policy.dtensor_cfg.enabled": True, "policy.max_total_sequence_length": 64}
_PHI = {"model_type": "phi3", "rope_type": "longrope", "fixed_positions": 64}
_GENERATED = "policy.generation.backend"
_OTHER = "--input model=PATH   # a model with one of these"


@pytest.mark.parametrize(
    ("key", "asked", "facts", "hint"),
    [
        (POLICY, {}, {"rope_type": "dynamic"}, _OTHER),
        (POLICY, _DTENSOR, {"rope_type": "dynamic", "fixed_positions": 64}, _OTHER),
        (POLICY, {**_DTENSOR, _GENERATED: "vllm"}, {**_PHI, "rope_type": "dynamic"}, _OTHER),
        (POLICY, {**_DTENSOR, _GENERATED: "embedded"}, _PHI, _OTHER),
        (POLICY, _DTENSOR, {**_PHI, "fixed_positions": 63}, "policy.max_total_sequence_length=63"),
        ("model", {"generation.backend": "embedded"}, {"rope_type": "longrope"}, _OTHER),
        ("model", {"generation.backend": "vllm"}, {"rope_type": "longrope"}, None),
        ("model", {"generation.backend": "embedded"}, {"model_type": "qwen3_moe"}, "generation.backend=vllm"),
        (POLICY, {_GENERATED: "embedded"}, {"model_type": "qwen3_moe"}, f"{_GENERATED}=vllm"),
    ],
)
def test_what_nobody_computes_of_a_model_is_told_when_it_is_planned(
    key: str, asked: dict[str, Any], facts: dict[str, Any], hint: str | None
) -> None:
    assert [hints for *_, hints in found(key, asked, **facts)] == ([(hint,)] if hint else [])
