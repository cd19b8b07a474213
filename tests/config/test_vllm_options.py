"""Options of vLLM that have keys of their own, in each step that generates."""

from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from nemotron_steps.config.schema.eval import DifficultyConfig, EvalConfig, StagesEvalConfig
from nemotron_steps.config.schema.rl import RlConfig

SCHEMAS: dict[str, tuple[type[BaseModel], str, str, str]] = {
    "rl": (RlConfig, "policy.generation", "policy", "grpo"),
    "eval": (EvalConfig, "generation", "evaluation", "evaluation"),
    "stages": (StagesEvalConfig, "generation", "evaluation", "evaluation"),
    "difficulty": (DifficultyConfig, "generation", "difficulty", "difficulty"),
}


def hints(step: str, backend: str = "vllm", **options: Any) -> list[str]:
    schema, section, *_ = SCHEMAS[step]
    values: dict[str, Any] = {"backend": backend, "vllm_kwargs": options}
    for part in reversed(section.split(".")):
        values = {part: values}
    try:
        schema.model_validate(values)
    except ValidationError as error:
        return [rule.hint for each in error.errors() for rule in each["ctx"]["error"].rules]
    return []


@pytest.mark.parametrize("step", SCHEMAS)
@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("max_model_len", 64, "{section}.max_total_sequence_length=64"),
        ("dtype", "bfloat16", "{section}.precision=bfloat16"),
        ("seed", 3, "{seed}.seed=3"),
        ("enforce_eager", True, "{generation}.vllm_cfg.enforce_eager=true"),
        ("enable_expert_parallel", True, None),
        ("logprobs_mode", "raw_logprobs", None),
    ],
)
def test_an_option_with_a_key_of_its_own_is_refused_with_that_key(
    step: str, option: str, value: Any, said: str | None
) -> None:
    _, generation, section, seed = SCHEMAS[step]
    key = f"~{generation}.vllm_kwargs.{option}"
    moved = "" if said is None else f" {said.format(generation=generation, section=section, seed=seed)}"
    assert hints(step, **{option: value}) == [f"{key}{moved}"]
