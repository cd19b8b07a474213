"""Prompts that leave no room for an answer are found before anything is loaded."""

from __future__ import annotations

import json

import pytest

from nemotron_steps.config.schema.rl import RlConfig
from nemotron_steps.engine.setup.rows import read_data
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


def test_where_sequences_grow_the_key_of_their_end_is_the_one_that_gives_room(tmp_path, model):
    config = config_of(tmp_path, model, 100, 300)
    growing = config.policy.model_copy(update={"max_total_sequence_length_end": 200})
    with pytest.raises(DataError) as caught:
        preflight.check_rl(config.model_copy(update={"policy": growing}), {})
    assert caught.value.expected == "fewer than 200 tokens (policy.max_total_sequence_length_end)"


def test_a_limit_that_leaves_out_every_prompt_is_refused(tmp_path, model):
    with pytest.raises(DataError, match="none of 2 prompts is within") as caught:
        preflight.check_rl(config_of(tmp_path, model, 50, 60, max_input_seq_length=49), {})
    assert caught.value.hints[0].startswith("data.max_input_seq_length=null ")


@pytest.mark.parametrize("change", [{"data": {"max_input_seq_length": 99}}, {"policy": 316}])
def test_what_its_hints_say_mends_it(tmp_path, model, change):
    config = config_of(tmp_path, model, 50, 99, 100, 300, **change.get("data", {}))
    if "policy" in change:
        policy = config.policy.model_copy(update={"max_total_sequence_length": change["policy"]})
        config = config.model_copy(update={"policy": policy})
    preflight.check_rl(config, {})
    left_out = []
    rows = read_data(config, left_out.append).train
    assert (len(rows), left_out) == ((2, [2]) if "data" in change else (4, []))


def test_texts_with_fewer_bytes_than_the_limit_are_not_looked_at(tmp_path, model):
    config = config_of(tmp_path, model, 50, 99)
    (model / "tokenizer.json").write_text("not one")
    preflight.check_rl(config, {})


def test_the_longest_sequence_of_a_run_whose_sequences_grow_is_what_counts(tmp_path, model):
    config = config_of(tmp_path, model, 50, 150)
    growing = config.policy.model_copy(update={"max_total_sequence_length_end": 151})
    preflight.check_rl(config.model_copy(update={"policy": growing}), {})
    growing = config.policy.model_copy(update={"max_total_sequence_length_end": 150})
    with pytest.raises(DataError, match="1 of 2 prompts leave no room"):
        preflight.check_rl(config.model_copy(update={"policy": growing}), {})
