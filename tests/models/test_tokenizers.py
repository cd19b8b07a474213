"""The small tokenizer: lossless, short on wording, letter by letter on content, and readable by plain transformers."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemotron_steps.errors import DataError
from nemotron_steps.models.tokenizers import MARKUP, SPECIAL_TOKENS, save_tokenizer, train_tokenizer

SPELL = "Spell this word backward (example: sun -> nus): "
SUM = "State the result, e.g. 1 2 3, of this problem: "
WORDS = ("neon", "bird", "space", "matrix", "zebra", "quilt", "jumbo", "vowel", "fjord", "glyph")


def texts() -> list[str]:
    questions = [f"{SPELL}{word}" for word in WORDS] * 5 + [f"{SUM}{a} + {b} =" for a in range(7) for b in range(7)]
    answers = [f"<answer>{word[::-1]}</answer>" for word in WORDS] * 5
    verdicts = [f'{{"score_1": {a}, "score_2": {b}}}' for a in (1, 5) for b in (1, 5)] * 12
    return questions + answers + verdicts


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(texts(), min_share=0.1)


def pieces(tokenizer, text: str) -> list[str]:
    return [tokenizer.decode([token]) for token in tokenizer.encode(text, add_special_tokens=False)]


def test_wording_is_one_token_and_content_is_not(tokenizer):
    assert pieces(tokenizer, SPELL + "neon") == [SPELL, "n", "e", "o", "n"]
    assert pieces(tokenizer, SUM + "4 + 2 =") == [SUM, "4", " + ", "2", " ="]
    assert pieces(tokenizer, "<answer>noen</answer>") == ["<answer>", "n", "o", "e", "n", "</answer>"]


@settings(max_examples=60, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40), st.sampled_from(["", SPELL, "</answer>"]))
def test_any_text_survives_a_round_trip(tokenizer, text, prefix):
    ids = tokenizer.encode(prefix + text, add_special_tokens=False)
    assert tokenizer.decode(ids) == prefix + text
    assert all(0 <= token < len(tokenizer) for token in ids)


def test_plain_transformers_loads_the_folder(tokenizer, tmp_path: Path):
    from transformers import AutoTokenizer

    save_tokenizer(tokenizer, tmp_path)
    assert {p.name for p in tmp_path.iterdir()} >= {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    loaded = AutoTokenizer.from_pretrained(str(tmp_path))
    assert len(loaded) == len(tokenizer)
    assert (loaded.eos_token, loaded.pad_token) == ("<|end|>", "<|pad|>")
    messages = [{"role": "user", "content": SPELL + "neon"}]
    prompt = loaded.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert prompt == f"<|user|>{SPELL}neon<|end|><|assistant|>"
    answered = [*messages, {"role": "assistant", "content": "noen"}]
    assert loaded.apply_chat_template(answered, tokenize=False) == prompt + "noen<|end|>"
    ids = loaded.encode(prompt + "noen<|end|>", add_special_tokens=False)
    assert loaded.decode(ids, skip_special_tokens=True) == SPELL + "neonnoen"


def test_markup_is_one_token_that_decoding_keeps(tokenizer):
    for mark in MARKUP:
        (token,) = tokenizer.encode(mark, add_special_tokens=False)
        assert tokenizer.decode([token], skip_special_tokens=True) == mark
    assert set(tokenizer.all_special_tokens) == set(SPECIAL_TOKENS)


def test_the_template_writes_reasoning_tools_and_tool_calls(tokenizer):
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "1 + 1"}]},
        {"role": "assistant", "content": "", "reasoning_content": "add them", "tool_calls": [call]},
        {"role": "tool", "content": "2"},
    ]
    text = tokenizer.apply_chat_template(messages, tools=[tool], tokenize=False, add_generation_prompt=True)
    assert text.startswith("<|system|>Tools:")
    assert '"name": "add"' in text.split("<|end|>")[0]
    assert '<|assistant|><think>add them</think><tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>' in text
    assert text.endswith("<|tool|>2<|end|><|assistant|>")


def test_no_text_is_an_error():
    with pytest.raises(DataError, match="no text"):
        train_tokenizer([])
