"""Conversations that go on in tokens, under the published templates."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemotron_steps.config.families import FAMILIES as MODEL_FAMILIES
from nemotron_steps.errors import ArtifactError, DataError
from nemotron_steps.models.chat import ChatFormat
from tests.models.stock_chats import FAMILIES, stock_chat

CHATS = {family: stock_chat(family) for family in FAMILIES}
MARKED = {family: stock_chat(family, special_markup=True) for family in FAMILIES}
"""The same with `</tool_call>` and the like special tokens, as the ends of turns are."""
TOOL = {"type": "function", "name": "add", "parameters": {"properties": {"by": {"type": "integer"}}}}
WORDS = ["7", "yes", "the answer is\n\n7", " x ", "<b>", "stub", "stubx", '{"by": 1}', "die Lösung 😀"]


def sampled_turn(chat: ChatFormat, drawn: random.Random, *, calls: int) -> tuple[list[int], dict[str, Any]]:
    """Tokens as a model may sample them, cut otherwise than the tokenizer cuts, and the turn they are."""
    thought, said = drawn.choice(WORDS), drawn.choice(WORDS)
    text = f"<think>\n{thought}\n</think>\n\n{said}" if drawn.random() < 0.7 else said
    ids = [token for letter in text for token in chat.tokenizer.encode(letter, add_special_tokens=False)]
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if calls:
        function = {"name": "add", "arguments": {"by": drawn.randrange(9)}}
        message["tool_calls"] = [{"type": "function", "id": f"c{i}", "function": function} for i in range(calls)]
        ids += chat.tokenizer.encode("<tool_call>...</tool_call>", add_special_tokens=False)
    return [*ids, chat.tokenizer.eos_token_id], message


@pytest.mark.parametrize("family", FAMILIES)
@given(seed=st.integers(0, 2**32), chats=st.sampled_from([CHATS, MARKED]))
@settings(max_examples=60, deadline=None)
def test_a_conversation_only_grows_and_grows_by_what_the_template_writes(
    family: str, seed: int, chats: dict[str, ChatFormat]
) -> None:
    chat, drawn = chats[family], random.Random(seed)
    tools = [TOOL] if drawn.random() < 0.7 else []
    messages = [{"role": "system", "content": drawn.choice(WORDS)}] if drawn.random() < 0.5 else []
    messages.append({"role": "user", "content": drawn.choice(WORDS)})
    tokens = chat.render(messages, tools)
    for _ in range(drawn.randrange(1, 5)):
        calls = drawn.randrange(2 if family == "llama3" else 3) if tools else 0
        ids, message = sampled_turn(chat, drawn, calls=calls)
        new = [{"role": "tool", "content": drawn.choice(WORDS)} for _ in range(calls)]
        if not calls or drawn.random() < 0.2:
            new.append({"role": "user", "content": drawn.choice(WORDS)})
        before = [*tokens, *ids]
        tokens = before + chat.render_continuation(new, tools)
        messages += [message, *new]
        # What was added is what the whole chat, rendered by the template, ends with; the turn's end is not repeated.
        added = chat.tokenizer.decode(tokens[len(before) :])
        assert chat.render_text(messages, tools).endswith(chat.decode_token(chat.tokenizer.eos_token_id) + added)
        end = chat.tokenizer.eos_token_id
        assert end in tokens[len(before) :] and tokens[len(before)] != end
        cut = chat.render_continuation(new, tools, turn_ended=False)
        assert cut == [chat.tokenizer.eos_token_id, *tokens[len(before) :]]


def test_a_chat_opens_thinking_where_its_generation_prompt_does() -> None:
    opened = {family for family, chat in CHATS.items() if chat.opens_thinking}
    assert opened == {"qwen3.5", "nemotron3", "nemotron3-keeps-thinking"}


def test_a_rows_own_variables_go_before_the_configs_and_leave_its_others() -> None:
    chat = of_template("{{ level }} {{ day }}").with_template_kwargs({"level": "high", "day": "Monday"})
    question = [{"role": "user", "content": "a"}]
    assert chat.with_template_kwargs({"level": "low"}).render_text(question) == "low Monday"
    assert chat.render_text(question) == "high Monday"
    assert chat.with_template_kwargs(None) is chat is chat.with_template_kwargs({})
    for name in ("add_generation_prompt", "messages"):
        with pytest.raises(DataError, match=f"must not have `{name}`"):
            chat.with_template_kwargs({"level": "low", name: True}, "f:2")


def test_a_turn_of_a_base_model_ends_where_the_template_ends_it() -> None:
    """Its end token is not the template's: neither is doubled."""
    chat = stock_chat("qwen3")
    chat.tokenizer.eos_token = "<|endoftext|>"
    question = [{"role": "user", "content": "a"}]
    text = "\n<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    assert chat.tokenizer.decode(chat.render_continuation(question)) == text
    assert chat.tokenizer.decode(chat.render_continuation(question, turn_ended=False)) == f"<|im_end|>{text}"


@pytest.mark.parametrize(
    ("text_closes", "calls_close", "chat_closes", "continues"),
    [
        ("<|im_end|>", "</tool_call><|im_end|>", "", "<|im_end|>"),
        ("</answer><|im_end|>", "</tool_call><|im_end|>", "", "<|im_end|>"),  # as Cohere's
        ("<|eot_id|>", "</tool_call><|eot_id|>", "<|im_end|>", "<|eot_id|>"),  # as Phi's, whose chat has an end, too
        ("<|im_end|>", "</tool_call><|eot_id|>", "", "<|eot_id|>"),  # as Llama's `<|eom_id|>`
        ("", "</tool_call>", "", ""),  # as GLM's: the next turn ends it
        ("", "</tool_call><|im_end|>", "", "<|im_end|>"),
    ],
)
def test_a_turn_of_calls_ends_after_what_closes_them(
    text_closes: str, calls_close: str, chat_closes: str, continues: str
) -> None:
    chat = of_template(
        "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}"
        "{% if m.tool_calls %}<tool_call>{{ m.tool_calls[0].function.arguments.x }}" + calls_close + "{% else %}"
        "{% if m.role == 'assistant' %}" + text_closes + "{% endif %}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant {% else %}" + chat_closes + "{% endif %}",
        "<tool_call>", "</tool_call>", "</answer>",
    )  # fmt: skip
    result = [{"role": "tool", "content": "7"}]
    text = "<|im_start|>tool 7<|im_start|>assistant "
    assert chat.tokenizer.decode(chat.render_continuation(result)) == text
    assert chat.tokenizer.decode(chat.render_continuation(result, turn_ended=False)) == f"{continues}{text}"


def of_template(template: str, *special: str) -> ChatFormat:
    chat = stock_chat("qwen3")
    chat.tokenizer.add_tokens(list(special), special_tokens=True)
    chat.tokenizer.chat_template = template
    return ChatFormat(chat.tokenizer)


def test_as_many_calls_as_results_where_the_template_asks_for_them() -> None:
    chat = of_template(
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}"
        "{% set results = messages | selectattr('role', 'equalto', 'tool') | list | length %}"
        "{% if results and messages[1].tool_calls | length != results %}{{ raise_exception('lost') }}{% endif %}"
    )
    results = [{"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}]
    assert chat.tokenizer.decode(chat.render_continuation(results)) == "[tool]1<|im_end|>[tool]2<|im_end|>"


def test_several_results_follow_one_call_where_the_template_allows_no_more() -> None:
    results = [{"role": "tool", "content": "first"}, {"role": "tool", "content": "second"}]
    text = CHATS["llama3"].tokenizer.decode(CHATS["llama3"].render_continuation(results, [TOOL]))
    assert text.index("first") < text.index("second") and text.count("ipython") == 2


def test_a_template_that_ends_turns_otherwise_before_a_message_is_refused() -> None:
    chat = of_template(
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
        "{{ '<|im_end|>' if loop.last else '<|im_start|>' }}{% endfor %}"
    )
    with pytest.raises(ArtifactError, match="ends an assistant turn otherwise") as caught:
        chat.render_continuation([{"role": "user", "content": "a"}])
    assert (caught.value.expected, caught.value.found) == ("'<|im_end|>'", "'<|im_start'")


@pytest.mark.parametrize("tool", [{**TOOL, "strict": True}, {"type": "function", "function": {"name": "add"}}])
def test_a_tool_is_shown_to_the_template_under_its_function(tool: dict[str, Any]) -> None:
    chat = of_template("{{ tools | tojson }}")
    function = {key: value for key, value in tool.items() if key not in ("type", "strict")}
    shown = {"type": "function", "function": tool.get("function", function)}
    assert json.loads(chat.render_text([{"role": "user", "content": "a"}], [tool])) == [shown]
    assert chat.render_text([{"role": "user", "content": "a"}]) == "null"


def test_a_tokenizer_that_puts_a_token_before_every_text_puts_none_into_a_chat() -> None:
    """The template writes what a chat begins with."""
    from tokenizers.processors import TemplateProcessing

    chat = stock_chat("qwen3")
    first = "<|im_start|>"
    tokens = [(first, chat.tokenizer.convert_tokens_to_ids(first))]
    chat.tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"{first} $A", special_tokens=tokens)
    assert chat.tokenizer.decode(chat.tokenizer.encode("a")) == f"{first}a"
    question = [{"role": "user", "content": "a"}]
    assert chat.tokenizer.decode(chat.render(question)) == chat.render_text(question)
    assert chat.tokenizer.decode(chat.render_continuation(question)).startswith(f"\n{first}user")
    assert (chat.count_tokens("a"), chat.count_tokens("")) == (1, 0)


def test_a_tokenizer_that_cuts_and_pads_other_texts_leaves_a_chat_whole() -> None:
    chat = stock_chat("qwen3")
    text = chat.render_text([{"role": "user", "content": "a b c d e f g"}])
    whole = chat.tokenizer.encode(text)
    chat.tokenizer.backend_tokenizer.enable_truncation(4)
    chat.tokenizer.backend_tokenizer.enable_padding(length=100)
    assert chat.encode(text) == whole


def test_a_folder_without_a_tokenizer_or_a_template_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="no tokenizer in the checkpoint"):
        ChatFormat.from_folder(tmp_path)
    chat = stock_chat("qwen3")
    chat.tokenizer.chat_template = None
    with pytest.raises(ArtifactError, match="no chat template"):
        ChatFormat(chat.tokenizer)


@pytest.mark.parametrize("family", [*MODEL_FAMILIES, "mistral", None])
@pytest.mark.parametrize("named", ["PreTrainedTokenizerFast", "TokenizersBackend", "Qwen2Tokenizer", None])
def test_the_tokenizer_is_the_one_that_transformers_chooses(
    family: str | None, named: str | None, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    CHATS["qwen3"].tokenizer.save_pretrained(str(tmp_path))
    said = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**said, "tokenizer_class": named}))
    if family is not None:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    expected, loaded = AutoTokenizer.from_pretrained(str(tmp_path)), ChatFormat.from_folder(tmp_path).tokenizer
    assert type(loaded) is type(expected) and loaded.init_kwargs == expected.init_kwargs
    text = "Hi  y'all,\n\n<|im_end|> x<think>7"
    assert loaded.encode(text) == expected.encode(text)


def test_tags_that_are_read_stay_in_what_was_said_where_they_are_special_tokens() -> None:
    """Or no call, and no reasoning, would be found."""
    said = '<think>\nso\n</think>\n\n<tool_call>\n{"name": "add"}\n</tool_call>'
    for chat in (CHATS["qwen3"], MARKED["qwen3"]):
        assert chat.decode(chat.encode(f"<|im_start|>{said}<|im_end|>")) == said
