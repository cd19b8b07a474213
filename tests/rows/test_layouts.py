"""What is read of the rows of others: docs/data.md's table, row by row, and what it has no room for."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from nemotron_steps.errors import DataError
from nemotron_steps.rows.layouts import (
    Chat,
    imported_prompt,
    read_chat,
    read_pair,
    read_prompt,
    read_request,
    without_padding,
)
from nemotron_steps.rows.messages import Message, written

USER, ASSISTANT = {"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}
SYSTEM = {"role": "system", "content": "Be brief."}
WRONG = {"role": "assistant", "content": "3"}
TABLE = re.findall(
    r"^\| ([^|]+) \| `(\{.+\})` \| (prompt|chat|pair|E410): ([^|]+) \|$",
    (Path(__file__).parents[2] / "docs" / "data.md").read_text(),
    re.MULTILINE,
)


def roles(messages: list[Message]) -> str:
    def one(message: Message) -> str:
        more = (("reasoning_content", "+reasoning"), ("tool_calls", "+call"))
        return message["role"] + "".join(mark for key, mark in more if message.get(key))

    return " ".join(map(one, messages))


def summary(chat: Chat) -> str:
    return roles(chat.messages) + (f", {len(chat.tools)} tool" if chat.tools else "")


def test_the_table_is_there() -> None:
    assert len(TABLE) > 25


@pytest.mark.parametrize(("source", "row", "kind", "said"), TABLE)
def test_the_table_of_the_docs_says_what_is_read(source: str, row: str, kind: str, said: str) -> None:
    given = json.loads(row)
    if kind == "prompt":
        assert summary(read_prompt(given, "f:1")) == said
    elif kind == "chat":
        assert summary(read_chat(given, "f:1")) == said
        assert read_chat({**given, "messages": written(read_chat(given, "f:1").messages)}, "f:1") == read_chat(
            given, "f:1"
        )
    elif kind == "pair":
        pair = read_pair(given, "f:1")
        assert f"{summary(pair.prompt)}, {roles(pair.chosen)}, {roles(pair.rejected)}" == said
    else:
        for read in (read_prompt,) if "prompt" in given else (read_chat,):
            with pytest.raises(DataError, match=re.escape(said)) as caught:
                read(given, "f:1")
            assert caught.value.code == "E410" and str(caught.value.where).startswith("f:1 field ")


@pytest.mark.parametrize(
    ("row", "asked", "beside"),
    [
        ({"prompt": "1 + 1?", "answer": "2"}, [USER], {}),
        ({"prompt": "1 + 1?", "messages": [SYSTEM, USER, ASSISTANT]}, [SYSTEM, USER], {}),
        ({"prompt": json.dumps(USER), "images": "[]", "image": {"bytes": None}}, [USER], {}),
        ({"id": 7, "question": "1 + 1?"}, [USER], {}),
        ({"messages": [SYSTEM, USER, ASSISTANT]}, [SYSTEM, USER], {"completion": "2"}),
        ({"messages": [USER, ASSISTANT], "completion": "two"}, [USER], {"completion": "two"}),
        ({"messages": [USER, ASSISTANT, USER]}, [USER, ASSISTANT, USER], {}),
        ({"responses_create_params": {"input": [USER]}, "agent_ref": {"name": "mcqa"}}, [USER], {}),
        ({"messages": [{**USER, "name": "ann"}, ASSISTANT]}, [{**USER, "name": "ann"}], {"completion": "2"}),
    ],
)
def test_an_imported_prompt_is_a_request_and_every_column_survives(
    row: dict[str, Any], asked: Any, beside: dict[str, Any]
) -> None:
    imported = imported_prompt(dict(row), "f:1")
    assert imported == {**row, **beside, "responses_create_params": {"input": asked}}
    assert read_request(imported, "f:1").messages == asked
    told = imported_prompt(dict(row), "f:1", system="Be brief.")["responses_create_params"]["input"]
    assert told == (asked if asked[0] == SYSTEM else [SYSTEM, *asked])


def test_the_column_that_is_named_is_the_prompt_of_a_row_of_nemo_gym_too() -> None:
    tools = [{"type": "function", "name": "look_up"}]
    row = {"responses_create_params": {"input": "no", "tools": tools}, "task": "1 + 1?"}
    assert imported_prompt(row, "f:1", "task") == {**row, "responses_create_params": {"input": [USER], "tools": tools}}
    assert imported_prompt(row, "f:1", "responses_create_params") == row
    assert imported_prompt({**row, "responses_create_params": json.dumps(row["responses_create_params"])}, "f:1") == row
    with pytest.raises(DataError, match="no column 'tusk'"):
        imported_prompt(row, "f:1", "tusk")


PAIRS: dict[str, tuple[dict[str, Any], list[Message], list[Message]]] = {
    "as JSON text": (
        {"prompt": json.dumps([USER]), "chosen": json.dumps([USER, ASSISTANT]), "rejected": json.dumps([USER, WRONG])},
        [USER],
        [ASSISTANT],
    ),
    "system in the answers alone": (
        {"prompt": [USER], "chosen": [SYSTEM, USER, ASSISTANT], "rejected": [SYSTEM, USER, WRONG]},
        [SYSTEM, USER],
        [ASSISTANT],
    ),
    "null fields and trailing space": (
        {
            "prompt": [USER],
            "chosen": [{**USER, "content": "1 + 1? ", "name": None}, ASSISTANT],
            "rejected": [USER, WRONG],
        },
        [USER],
        [ASSISTANT],
    ),
    "implicit, answers of several turns": (
        {"chosen": [USER, ASSISTANT, USER, ASSISTANT], "rejected": [USER, WRONG, USER, WRONG]},
        [USER],
        [ASSISTANT, USER, ASSISTANT],
    ),
    "a prompt and transcripts": (
        {
            "prompt": "1 + 1?",
            "chosen": "\n\nHuman: 1 + 1?\n\nAssistant: 2",
            "rejected": "\n\nHuman: 1 + 1?\n\nAssistant: 3",
        },
        [USER],
        [ASSISTANT],
    ),
    "texts that begin with the prompt": (
        {"prompt": "1 + 1?", "chosen": "1 + 1? 2", "rejected": "1 + 1? 3"},
        [USER],
        [ASSISTANT],
    ),
    "a passage beside the question": (
        {"question": "1 + 1?", "context": "Sums.", "history": [["a", "b"]], "chosen": "2", "rejected": "3"},
        [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b"},
            {"role": "user", "content": "1 + 1?\n\nSums."},
        ],
        [ASSISTANT],
    ),
    "an answer that is JSON": (
        {"prompt": "1 + 1?", "chosen": '{"role": "user"}', "rejected": "[1]"},
        [USER],
        [{"role": "assistant", "content": '{"role": "user"}'}],
    ),
    "an answer that is JSON with arguments, and no tools": (
        {"prompt": "1 + 1?", "chosen": '{"arguments": 1}', "rejected": '[{"name": "f", "arguments": {}}]'},
        [USER],
        [{"role": "assistant", "content": '{"arguments": 1}'}],
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_the_prompt_of_a_pair_stands_once(name: str) -> None:
    row, prompt, chosen = PAIRS[name]
    for given in (row, without_padding(row)):
        pair = read_pair(given, "f:1")
        assert [(m["role"], m["content"].strip()) for m in pair.prompt.messages] == [
            (m["role"], m["content"]) for m in prompt
        ]
        assert pair.chosen == chosen and pair.rejected[0]["role"] == "assistant"


OTHER = {"role": "user", "content": "Who?"}
REFUSED: list[tuple[Any, dict[str, Any], str, str]] = [
    (read_prompt, {"prompt": "[{'role': 'user', 'content': 'x'}]"}, "as Python writes them", "prompt"),
    (read_prompt, {"prompt": "x", "tools": [{"name": "f"}], "functions": [{"name": "g"}]}, "other `functions`",
     "functions"),
    (read_prompt, {"prompt": "x", "system": "a", "system_prompt": "b"}, "another system prompt", "system_prompt"),
    (read_request, {"responses_create_params": {"input": "x"}, "tools": [{"function": {}}]}, "beside", "tools"),
    (read_chat, {"instruction": "x", "input": [1], "output": "y"}, "must be a text beside a question", "input"),
    (read_chat, {"text": "A page.\n\nUser: x\n\nAssistant: y"}, "plain text has no turns", "text"),
    (read_chat, {"prompt": "x", "completion": "y", "label": False}, "not one to imitate", "label"),
    (read_pair, {"messages": [SYSTEM, USER], "chosen": [{**SYSTEM, "content": "b"}, USER, ASSISTANT],
                 "rejected": [WRONG]}, "different system prompts", "messages"),
    (read_prompt, {"prompt": [{"role": "user"}]}, "has neither `content` nor `tool_calls`", "prompt[0]"),
    (read_prompt, {"messages": [ASSISTANT]}, "has an answer and no question", "messages"),
    (read_request, {"prompt": "x"}, "must be an object with `input`", "responses_create_params"),
    (read_prompt, {"system": "a", "prompt": [SYSTEM, USER]}, "another system prompt", "system"),
    (read_chat, {"messages": [USER]}, "no message is the assistant's", "messages"),
    (read_pair, {"prompt": "x", "chosen": "a"}, "no rejected answer", "rejected"),
    (read_pair, {"prompt": "x", "chosen": "a", "rejected": "a"}, "the same answer", ""),
    (read_pair, {"prompt": [USER], "chosen": [OTHER, ASSISTANT], "rejected": [OTHER, WRONG]}, "of the user", "chosen"),
    (read_pair, {"prompt": [SYSTEM, USER], "chosen": [{**SYSTEM, "content": "b"}, USER, WRONG], "rejected": "x"},
     "different system prompts", "prompt"),
    (read_pair, {"chosen": [USER, ASSISTANT], "rejected": [USER]}, "begins with a message of the user", "chosen"),
]  # fmt: skip


@pytest.mark.parametrize(("read", "row", "said", "field"), REFUSED)
def test_a_row_that_cannot_be_read_is_told_by_its_field(read: Any, row: dict[str, Any], said: str, field: str) -> None:
    with pytest.raises(DataError, match=re.escape(said)) as caught:
        read(row, "rows.jsonl:3")
    assert caught.value.where == f"rows.jsonl:3 field {field}".removesuffix(" field ")
    assert caught.value.hints[-1].startswith("sed -n 3p rows.jsonl")
