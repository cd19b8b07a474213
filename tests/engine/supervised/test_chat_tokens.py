"""Which tokens of a chat are an assistant's, whatever the template writes around them."""

from __future__ import annotations

from typing import Any

import pytest

from nemotron_steps.engine.supervised.chat_tokens import ChatSequence, encode_chat
from nemotron_steps.errors import DataError
from nemotron_steps.models.chat import ChatFormat
from nemotron_steps.models.tokenizers import train_tokenizer

PLAIN = "{{ m.content }}"
ANSWER = "{{ '[' + m.content + eos_token }}\n"
PROMPT = "{% if add_generation_prompt %}[{% endif %}"
TURNS = [
    {"role": "user", "content": "ask"},
    {"role": "assistant", "content": "one"},
    {"role": "user", "content": "more"},
    {"role": "assistant", "content": "two"},
]


def format_of(answer: str = ANSWER, prompt: str = PROMPT, said: str = PLAIN) -> ChatFormat:
    chat = ChatFormat(train_tokenizer(["ask more one two"] * 3))
    chat.tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}" + answer + "{% else %}" + said + "{% endif %}"
        "{% endfor %}" + prompt
    )
    return chat


def texts(chat: ChatFormat, sequence: ChatSequence) -> list[str]:
    """Of what is trained and what is not, in turn."""
    parts: list[list[int]] = []
    before = None
    for token, bit in zip(sequence.token_ids, sequence.token_mask, strict=True):
        if bit != before:
            parts.append([])
        parts[-1].append(token)
        before = bit
    return [str(chat.tokenizer.decode(part)) for part in parts]


def test_an_answer_ends_with_its_end_token_and_what_follows_that_is_the_templates() -> None:
    chat = format_of()
    end = chat.tokenizer.eos_token
    sequence = encode_chat(chat, TURNS, "f:1", {})
    assert sequence.token_mask[0] == 0
    assert texts(chat, sequence) == ["ask[", f"one{end}", "\nmore[", f"two{end}"]  # no newline after the last one


def test_turns_after_the_last_answer_are_left_out() -> None:
    chat = format_of()
    assert encode_chat(chat, TURNS[:3], "f:1", {}) == encode_chat(chat, TURNS[:2], "f:1", {})


def test_a_rows_tools_are_told_before_its_answers() -> None:
    chat = format_of()
    chat.tokenizer.chat_template = "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}" + str(
        chat.tokenizer.chat_template
    )
    tools = [{"type": "function", "function": {"name": "two"}}]
    assert texts(chat, encode_chat(chat, TURNS, "f:1", {"tools": tools}))[0] == "two ask["


@pytest.mark.parametrize(
    "changes",
    [
        {"answer": "{{ '[' + (m.content if loop.last else '') + eos_token }}"},  # drops what was said before
        {"prompt": "{% if add_generation_prompt %}({% endif %}"},  # prompts otherwise than it shows answers
        {"said": "{{ loop.length }}"},
    ],
    ids=["earlier turns", "prompt", "count"],
)
def test_a_template_that_rewrites_earlier_turns_is_refused_with_what_to_do(changes: dict[str, str]) -> None:
    with pytest.raises(DataError, match="rewrites earlier turns") as caught:
        encode_chat(format_of(**changes), TURNS, "f:1", {})
    assert caught.value.where == "f:1" and caught.value.hints[0].startswith("make a row of each assistant turn")


@pytest.mark.parametrize(
    ("turns", "what"),
    [
        (TURNS[:1], "no assistant turn"),
        ([], "non-empty list"),
        ([TURNS[0], {"role": "assistant", "content": None}], "neither `content`"),
    ],
)
def test_a_chat_that_teaches_nothing_or_cannot_be_written_is_refused(turns: list[dict[str, Any]], what: str) -> None:
    with pytest.raises(DataError, match=what) as caught:
        encode_chat(format_of(), turns, "f:1", {})
    assert str(caught.value.where).startswith("f:1")


def test_a_comparison_that_the_template_passes_over_is_refused() -> None:
    roles = ("user", "response_1", "response_2", "assistant")
    turns = [{"role": role, "content": f" {role} "} for role in roles]
    encode_chat(format_of(said="{{ m.content | trim }}"), turns, "f:3", {})
    with pytest.raises(DataError, match="leaves out the response_2 message") as caught:
        encode_chat(format_of(said="{% if m.role != 'response_2' %}{{ m.content }}{% endif %}"), turns, "f:3", {})
    assert caught.value.where == "f:3" and caught.value.hints[0].startswith("comparisons.layout=plain")
