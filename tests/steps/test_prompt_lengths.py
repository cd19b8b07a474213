"""Prompts that leave no room for an answer are found before anything is loaded."""

from __future__ import annotations

import json

import pytest

from nemotron_steps.config.schema.rl import RlConfig
from nemotron_steps.errors import DataError
from nemotron_steps.steps import preflight
from tests.models.checkpoints import write_tokenizer


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


@pytest.mark.parametrize(
    ("lengths", "hints"),
    [
        ((50, 100, 300), ("policy.max_total_sequence_length=316", "data.max_input_seq_length=99")),
        ((100, 300), ("policy.max_total_sequence_length=316", "sed -n 1p")),
        # The model has 4,096 positions: no longer sequence than that can be asked for.
        ((50, 100, 4090), ("policy.max_total_sequence_length=4096", "data.max_input_seq_length=99")),
        ((50, 100, 4096), ("data.max_input_seq_length=99", "sed -n 2p")),
        ((100, 4096), ("sed -n 1p",)),
    ],
)
def test_where_most_prompts_leave_no_room_the_first_hint_gives_it_if_the_model_can(tmp_path, model, lengths, hints):
    with pytest.raises(DataError, match="leave no room") as caught:
        preflight.check_rl(config_of(tmp_path, model, *lengths), {})
    starts = [hint[: len(start)] for hint, start in zip(caught.value.hints, hints, strict=False)]
    assert starts == list(hints)
    assert any(hint.startswith("data.") for hint in caught.value.hints) is (50 in lengths)
