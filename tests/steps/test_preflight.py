"""What the training steps refuse before any step of a run starts."""

import json

import pytest

from nemotron_steps.config.schema.opd import OpdConfig
from nemotron_steps.config.schema.rl import RlConfig
from nemotron_steps.config.schema.sft import SftConfig
from nemotron_steps.errors import ConfigError, DataError, UnsupportedError
from nemotron_steps.steps import preflight
from nemotron_steps.steps.preflight import check_supervised
from tests.models.checkpoints import write_tokenizer


@pytest.mark.parametrize("key", ["grpo.val_period", "grpo.val_at_start", "grpo.val_at_end"])
def test_validation_without_prompts_for_it_is_refused(key, tmp_path):
    rows = tmp_path / "train.jsonl"
    rows.write_text("{}\n")
    config = RlConfig.model_validate(
        {
            "grpo": {key.split(".")[1]: 1 if key.endswith("period") else True},
            "data": {"train": {"data_path": str(rows)}},
        }
    )
    preflight.check_rl(config, {"prompts": None})  # an earlier step may make them
    with pytest.raises(ConfigError, match=f"{key} asks for validation") as caught:
        preflight.check_rl(config, {})
    assert caught.value.hints[1] == (f"{key}=-1" if key.endswith("period") else f"{key}=false")
    data = config.data.model_copy(update={"validation": config.data.train})
    with pytest.raises(DataError):  # of these rows, which are no prompts, and no more of their absence
        preflight.check_rl(config.model_copy(update={"data": data}), {})


@pytest.mark.parametrize("named", [
    {"default_teacher_alias": "mth"}, {"teacher_model_by_agent_name": {"agent": "mth"}},
    {"non_colocated_teachers": {"enabled": True, "teacher_overrides": {"mth": {"precision": "bfloat16"}}}},
])  # fmt: skip
def test_a_teacher_that_is_not_there_is_told_before_its_prompts_and_policy_are_made(named):
    config = OpdConfig.model_validate({"on_policy_distillation": named, "cluster": {"backend": "ray"}})
    with pytest.raises(ConfigError, match="unknown teacher 'mth'"):
        preflight.check_rl(config, {"prompts": None, "policy": None, "teachers.math": None})
    preflight.check_rl(config, {"prompts": None, "policy": None, "teachers.mth": None})


def test_a_layout_that_does_not_fit_the_model_is_refused_before_any_step_starts(tmp_path):
    """Of a model that the planner could not look at: an earlier step made it, or the config describes it."""
    shape = {"model_type": "qwen3", "hidden_size": 8, "intermediate_size": 8, "vocab_size": 8}
    heads = {
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 8192,
    }
    (tmp_path / "config.json").write_text(json.dumps({**shape, **heads}))
    cluster = {"backend": "ray", "policy_workers": 4}
    policy = {"checkpoint": str(tmp_path), "megatron_cfg": {"tensor_model_parallel_size": 4}}
    config = RlConfig.model_validate({"policy": policy, "cluster": cluster})
    with pytest.raises(ConfigError, match="does not divide 6 attention heads") as caught:
        preflight.check_rl(config, {"prompts": None})
    assert caught.value.hints[0] == "policy.megatron_cfg.tensor_model_parallel_size=2"
    preflight.check_rl(config, {"prompts": None, "policy": None})  # not that one: an earlier step will make another
    scratch = {"policy": {"megatron_cfg": {"pipeline_model_parallel_size": 4}}, "cluster": cluster}
    made_up = SftConfig.model_validate({**scratch, "from_scratch": {"num_hidden_layers": 6}})
    with pytest.raises(ConfigError, match="does not divide 6 layers"):
        preflight.check_placement(made_up, {})
    tuned = SftConfig.model_validate({"policy": policy, "cluster": cluster})
    with pytest.raises(ConfigError, match="does not divide 6 attention heads"):
        check_supervised(tuned, {})
    check_supervised(tuned, {"model": None})


def test_a_supervised_step_has_a_model_or_the_shape_of_one():
    with pytest.raises(ConfigError, match="nothing to train"):
        check_supervised(SftConfig(), {})
    check_supervised(SftConfig(), {"model": None})
    scratch = {"from_scratch": {}, "policy": {"max_total_sequence_length": 512}}
    check_supervised(SftConfig.model_validate(scratch), {})
    scratch["policy"]["megatron_cfg"] = {"peft": {"enabled": True}}
    check_supervised(SftConfig.model_validate(scratch), {"model": None})


def test_functions_that_cannot_be_loaded_are_told_before_anything_runs(tmp_path):
    (tmp_path / "own.py").write_text("def score(completions, **columns):\n    return [0.0 for _ in completions]\n")

    def config(*functions):
        settings = {"reward_function": {"functions": [{"function": f"{tmp_path}/own.py:{name}"} for name in functions]}}
        return RlConfig.model_validate({"env": {"nemo_gym": {"environments": settings}}})

    preflight.check_rl(config("score"), {"prompts": None})
    with pytest.raises(ConfigError, match="scor"):
        preflight.check_rl(config("score", "scor"), {"prompts": None})


def test_what_one_process_cannot_do_is_refused_before_any_step_starts():
    cluster = {"backend": "process", "policy_workers": 2}
    given = {"from_scratch": {}, "policy": {"max_total_sequence_length": 512}, "cluster": cluster}
    with pytest.raises(UnsupportedError, match="need Ray"):
        preflight.check_placement(SftConfig.model_validate(given), {})
    with pytest.raises(UnsupportedError, match="need Ray"):
        preflight.check_rl(RlConfig.model_validate({"cluster": cluster}), {"prompts": None})


@pytest.fixture
def model(tmp_path):
    """One token a byte."""
    shape = {"model_type": "qwen3", "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    sizes = {"hidden_size": 8, "intermediate_size": 8, "max_position_embeddings": 4096, "vocab_size": 300}
    write_tokenizer(tmp_path / "model", 300)
    (tmp_path / "model" / "config.json").write_text(json.dumps({**shape, **sizes}))
    return tmp_path / "model"


def config_of(tmp_path, model, *lengths, **data):
    file = tmp_path / "train.jsonl"
    agent = {"name": "mcqa_simple_agent"}
    texts = ["A or B?".ljust(length, "x") for length in lengths]
    rows = [
        {"responses_create_params": {"input": [{"role": "user", "content": text}]}, "expected_answer": "A",
         "options": [{"A": "1"}, {"B": "2"}], "agent_ref": agent}
        for text in texts
    ]  # fmt: skip
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = {
        "grpo": {"num_prompts_per_step": 1},
        "policy": {"checkpoint": str(model), "max_total_sequence_length": 100, "generation": {"max_new_tokens": 16}},
        "data": {"train": {"data_path": str(file)}, **data},
    }
    return RlConfig.model_validate(values)


def test_a_prompt_that_fills_the_sequence_is_refused_and_named(tmp_path, model):
    config = config_of(tmp_path, model, 50, 60, 100, 300)
    with pytest.raises(DataError, match="2 of 4 prompts leave no room") as caught:
        preflight.check_rl(config, {})
    assert caught.value.where.endswith("train.jsonl:3")
    assert caught.value.hints[:2] == (
        "data.max_input_seq_length=99   # leaves them out",
        "policy.max_total_sequence_length=316   # room for all of them",
    )
    preflight.check_rl(config, {"policy": None})  # an earlier step will make the model that counts them
