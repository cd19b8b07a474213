"""Prompts as TRL, verl, OpenAI chats and tables have them become rows that an RL step takes."""

from __future__ import annotations

from typing import Any

import pytest

from nemotron_steps.errors import DataError
from nemotron_steps.steps.data_prep.prompt_layouts import PromptImport, layout_of

USER = [{"role": "user", "content": "1 + 1?"}]
PAIR = [*USER, {"role": "assistant", "content": "2"}]
LAYOUTS: dict[str, tuple[dict[str, Any], str]] = {
    "trl text": ({"prompt": "1 + 1?", "answer": "2"}, "trl"),
    "trl chat": ({"prompt": USER, "answer": "2"}, "trl"),
    "verl": ({"prompt": USER, "data_source": "sums", "reward_model": {"ground_truth": "2"}}, "verl"),
    "openai": ({"messages": PAIR, "answer": "2"}, "chat"),
    "sharegpt": ({"conversations": [{"from": "human", "value": "1 + 1?"}, {"from": "gpt", "value": "2"}]}, "chat"),
    "table": ({"id": 7, "question": "1 + 1?", "answer": "2"}, "table"),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_is_recognised_and_every_column_survives(name: str) -> None:
    row, layout = LAYOUTS[name]
    assert layout_of(row)[0] == layout
    imported = PromptImport().imported("rows.jsonl:1", dict(row))
    assert imported["responses_create_params"] == {"input": USER}
    assert {key: imported[key] for key in row} == row
    assert imported.get("completion") == ("2" if layout == "chat" else None)


def test_a_row_of_nemo_gym_stays_as_it_is() -> None:
    row = {"responses_create_params": {"input": USER}, "agent_ref": {"name": "mcqa"}}
    assert PromptImport().imported("rows.jsonl:1", row) == row


def test_the_column_that_is_named_is_the_prompt_of_a_row_of_nemo_gym_too() -> None:
    tools = [{"type": "function", "name": "look_up"}]
    row = {"responses_create_params": {"input": "no", "tools": tools}, "task": "1 + 1?"}
    imported = PromptImport("task").imported("rows.jsonl:1", row)
    assert imported == {**row, "responses_create_params": {"input": USER, "tools": tools}}
    assert PromptImport("responses_create_params").imported("rows.jsonl:1", row) == row
    with pytest.raises(DataError, match="no column 'tusk'"):
        PromptImport("tusk").imported("rows.jsonl:1", row)


@pytest.mark.parametrize("prompt", [USER, "1 + 1?"])
def test_a_system_message_goes_before_a_prompt_of_nemo_gym_that_has_none(prompt: Any) -> None:
    def imported(**request: Any) -> Any:
        row = {"responses_create_params": {"input": prompt, **request}}
        return PromptImport(system="Be brief.").imported("rows.jsonl:1", row)["responses_create_params"]

    system = {"role": "system", "content": "Be brief."}
    assert imported() == {"input": [system, *USER]}
    assert imported(instructions="Be long.") == {"input": prompt, "instructions": "Be long."}
    for role in ("system", "developer"):
        own = [{"role": role, "content": "Be long."}, *USER]
        assert imported(input=own) == {"input": own}


def test_earlier_turns_stay_in_the_prompt() -> None:
    turns = [{"role": "system", "content": "Be brief."}, *PAIR, *USER, {"role": "assistant", "content": "4"}]
    imported = PromptImport(system="not said").imported("rows.jsonl:1", {"messages": turns})
    assert imported["responses_create_params"]["input"] == turns[:4]
    assert imported["completion"] == "4"


def test_column_and_system_message_can_be_given() -> None:
    imported = PromptImport("task", "Be brief.").imported("rows.jsonl:1", {"prompt": "no", "task": "yes"})
    assert imported["responses_create_params"]["input"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "yes"},
    ]


@pytest.mark.parametrize(
    ("row", "told", "hint"),
    [
        ({"text": "1 + 1?", "id": "a"}, "nothing in the row is a prompt", "prompt_column=text"),
        ({"prompt": [{"role": "user"}]}, "neither a text nor a list of messages", "sed -n 3p rows.jsonl"),
        ({"prompt": 5}, "neither a text nor a list of messages", "sed -n 3p rows.jsonl"),
        ({"messages": [{"role": "assistant", "content": "2"}]}, "neither a text nor a list", "sed -n 3p"),
        ({"responses_create_params": {}}, "must be a text or a non-empty list", "sed -n 3p"),
    ],
)
def test_what_is_no_prompt_is_refused_with_a_correct_row(row: dict[str, Any], told: str, hint: str) -> None:
    with pytest.raises(DataError) as raised:
        PromptImport().imported("rows.jsonl:3", row)
    assert told in raised.value.what
    assert any(hint in each for each in raised.value.hints)


def test_an_answer_of_the_rows_own_stays_and_so_does_what_a_message_has_besides() -> None:
    row = {"messages": [{**USER[0], "name": "ann"}, PAIR[1]], "completion": "two"}
    imported = PromptImport().imported("rows.jsonl:1", row)
    assert imported["completion"] == "two" and imported["responses_create_params"]["input"] == [row["messages"][0]]


@pytest.mark.parametrize(
    ("row", "layout"),
    [
        ({"prompt": "", "question": "1 + 1?"}, ("table", "question")),
        ({"question": " ", "problem": "1 + 1?"}, ("table", "problem")),
        ({"messages": [], "instruction": "x"}, ("table", "instruction")),
        ({"query": "x", "input": "y"}, ("table", "query")),
        ({"prompt": "x", "data_source": "sums"}, ("verl", "prompt")),
        ({"prompt": "x", "reward_model": {}}, ("verl", "prompt")),
        ({"prompt": "x", "messages": PAIR}, ("trl", "prompt")),
        ({"question": 3}, ("", "")),
    ],
)
def test_a_column_that_holds_nothing_is_not_the_prompt(row: dict[str, Any], layout: tuple[str, str]) -> None:
    assert layout_of(row) == layout


def test_a_column_whose_name_cannot_be_pasted_is_not_offered() -> None:
    with pytest.raises(DataError) as raised:
        PromptImport().imported("rows.jsonl:3", {"the task": "a long text", "kind": "text"})
    assert raised.value.hints == ("prompt_column=kind", "sed -n 3p rows.jsonl   # the row")


def test_the_longest_texts_are_offered_as_the_prompt() -> None:
    with pytest.raises(DataError) as raised:
        PromptImport().imported("rows.jsonl:3", {"id": "a", "task": "a long text", "kind": "text"})
    assert raised.value.hints[:2] == ("prompt_column=task", "prompt_column=kind")
