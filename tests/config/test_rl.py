"""What the sections of an RL config say of themselves."""

from __future__ import annotations

import re

import pytest

from nemotron_steps.config.schema.opd import NonColocatedTeachersConfig
from nemotron_steps.config.schema.policy import GenerationConfig, PolicyConfig
from nemotron_steps.config.schema.rl import RlConfig


def test_a_teacher_has_what_is_said_of_it_and_else_the_default():
    apart = {"enabled": True, "default_teacher_cfg": {"num_nodes": 2, "precision": "float32"}}
    apart["teacher_overrides"] = {"a": {"num_nodes": 1}, "b": {"precision": None}}
    found = NonColocatedTeachersConfig.model_validate(apart)
    said = {name: (found.of(name).num_nodes, found.of(name).precision) for name in "abc"}
    assert said == {"a": (1, "float32"), "b": (2, None), "c": (2, "float32")}
    assert NonColocatedTeachersConfig.model_validate(found.model_dump()) == found


@pytest.mark.parametrize(
    ("values", "batch"),
    [
        ({}, 256),
        ({"grpo": {"num_prompts_per_step": 4}}, 32),
        ({"grpo": {"num_generations_per_prompt": 4}}, 128),
        ({"policy": {"train_global_batch_size": None}, "grpo": {"num_prompts_per_step": 2}}, 16),
        ({"policy": {"train_global_batch_size": 64}}, 64),
    ],
)
def test_rollouts_of_a_step_make_one_update_unless_a_batch_is_given(values, batch):
    assert RlConfig.model_validate(values).policy.train_global_batch_size == batch


@pytest.mark.parametrize(
    ("key", "slip", "told"),
    [
        ("reasoning_parser", "qwen4", "; did you mean qwen3? (known: qwen3, deepseek_r1, nano_v3, none)"),
        (
            "tool_parser",
            "hermse",
            "; did you mean hermes? (known: hermes, qwen3_coder, llama3_json, nemotron_json, none)",
        ),
        ("tool_parser", "zzzzzz", " (known: hermes, qwen3_coder, llama3_json, nemotron_json, none)"),
    ],
)
def test_a_parser_that_is_not_there_is_told_with_the_nearest_and_all(key, slip, told):
    with pytest.raises(ValueError, match=f"no parser is named '{slip}'{re.escape(told)}"):
        GenerationConfig.model_validate({key: slip})


def test_null_stands_for_nothing_where_a_list_or_a_number_is_read():
    config = GenerationConfig.model_validate({"stop_token_ids": None, "stop_strings": None, "top_k": None})
    assert (config.stop_token_ids, config.stop_strings, config.top_k) == ((), (), 0)
    peft = {"enabled": True, "target_modules": None, "exclude_modules": None}
    megatron = PolicyConfig.model_validate({"megatron_cfg": {"mtp_num_layers": None, "peft": peft}}).megatron_cfg
    assert (megatron.mtp_num_layers, megatron.peft.target_modules, megatron.peft.exclude_modules) == (0, (), ())
